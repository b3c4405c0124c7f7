"""Passes of the vocoder: pieces of similar lengths together, on CUDA by captured graphs.

A pass is one function of tensors that stay where they are, with no choice that hangs on what is in them, so a graph has
all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_cluster.kernels.cuda_graphs import CapturedWork, GraphPool, size_at_least
from omni_cluster.models.qwen3_omni.code2wav import PASS_CODES, PASS_ROWS, Reach
from omni_cluster.models.qwen3_omni.vocoder_layers import CodeRows, RowsWave

LENGTHS = (4, 8, 16, 32, PASS_CODES)
"""Codes of a piece in a pass at most: shorter ones are filled up, which the context before them outweighs."""
BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class StreamState:
    """What a stream keeps of the codes that it had, `count` of them.

    `kept` `[layers, 2, heads, window - 1, head_dim]`: keys and values of the last codes, zero before the first one.
    `rows` `[context, hidden]`: the transformer's last rows, as many as there are, then anything.
    """

    count: int
    kept: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class PassTensors:
    """What a pass reads and writes.

    `table` int64 `[B, 2 + n * Q]`: of each piece how many codes its stream had before it, its own length, its codes.
    `kept`, `rows`: the states before it, then those behind it. `waves` `[B, samples]`, in float32 at least.
    """

    table: torch.Tensor
    kept: torch.Tensor
    rows: torch.Tensor
    waves: torch.Tensor

    def part(self, batch: int, width: int, samples: int) -> PassTensors:
        """Of a smaller pass, in the same memory."""
        table, waves = self.table.flatten()[: batch * width], self.waves.flatten()[: batch * samples]
        return PassTensors(table.view(batch, width), self.kept[:batch], self.rows[:batch], waves.view(batch, samples))

    def fill(self, states: Sequence[StreamState], codes: Sequence[np.ndarray]) -> None:
        table = np.zeros(self.table.shape, np.int64)
        for row, state, each in zip(table, states, codes, strict=False):
            row[:2] = state.count, len(each)
            row[2 : 2 + each.size] = each.ravel()
        self.table.copy_(on_device(torch.from_numpy(table), self.table.device))
        torch.stack([state.kept for state in states], out=self.kept[: len(states)])
        torch.stack([state.rows for state in states], out=self.rows[: len(states)])


class VocoderPass(nn.Module):
    """One pass over `PassTensors`."""

    def __init__(self, model: Qwen3OmniMoeCode2Wav) -> None:
        super().__init__()
        config = model.config
        self.reach = Reach.of(config.upsampling_ratios, config.upsample_rates)
        self.codebooks = config.num_quantizers
        self.code_rows, self.rows_wave = CodeRows(model), RowsWave(model)
        self.rows_shape = (self.reach.context, config.hidden_size)

    @property
    def weight(self) -> torch.Tensor:
        return self.code_rows.embedding.weight

    def new_state(self) -> StreamState:
        """Of a stream that has had no codes."""
        return StreamState(0, self.weight.new_zeros(self.code_rows.kept_shape), self.weight.new_zeros(self.rows_shape))

    def tensors(self, batch: int, length: int) -> PassTensors:
        zeros = self.weight.new_zeros
        waves = zeros(batch, self.samples(length), dtype=torch.promote_types(self.weight.dtype, torch.float32))
        kept, rows = zeros(batch, *self.code_rows.kept_shape), zeros(batch, *self.rows_shape)
        return PassTensors(zeros(batch, self.width(length), dtype=torch.int64), kept, rows, waves)

    def width(self, length: int) -> int:
        return 2 + length * self.codebooks

    def samples(self, length: int) -> int:
        """Of the longest piece of a pass with all of its context."""
        return self.reach.samples(self.reach.context + length)

    def forward(self, tensors: PassTensors) -> None:
        counts, lengths = tensors.table[:, 0], tensors.table[:, 1]
        codes = tensors.table[:, 2:].unflatten(1, (-1, self.codebooks))
        rows, both = self.code_rows(codes, counts, tensors.kept)
        contexts = counts.clamp(max=self.reach.context)
        windows = self._windows(tensors.rows, rows, contexts)
        tensors.waves.copy_(self.rows_wave(windows))
        for layer, of_layer in enumerate(both):
            tensors.kept[:, layer] = ahead(of_layer, 3, lengths, self.code_rows.window - 1)
        there = contexts + lengths
        tensors.rows.copy_(ahead(windows, 1, there - there.clamp(max=self.reach.context), self.reach.context))

    @staticmethod
    def _windows(before: torch.Tensor, rows: torch.Tensor, contexts: torch.Tensor) -> torch.Tensor:
        """Of each piece the rows of its context, its own, then anything: `[B, context + n, hidden]`.

        The first row of a request must be the first one that the convolutions see.
        """
        all_rows = torch.cat([before, rows], 1)
        place = torch.arange(all_rows.shape[1], device=rows.device)
        skipped = (before.shape[1] - contexts)[:, None] * (place >= contexts[:, None])
        return along(all_rows, 1, (place + skipped).clamp(max=len(place) - 1))


def ahead(tensor: torch.Tensor, dim: int, starts: torch.Tensor, count: int) -> torch.Tensor:
    """`count` entries of `dim` from each piece's own start on."""
    return along(tensor, dim, starts[:, None] + torch.arange(count, device=starts.device))


def along(tensor: torch.Tensor, dim: int, places: torch.Tensor) -> torch.Tensor:
    """Entries of `dim` by each piece's own places `[B, n]`."""
    shape = [*tensor.shape]
    shape[dim] = places.shape[1]
    index = places.view([len(places) if i == 0 else shape[dim] if i == dim else 1 for i in range(len(shape))])
    return tensor.gather(dim, index.expand(shape))


class Passes:
    """Pieces of streams by as many passes as they need, on CUDA all of sizes that were captured if `captures`."""

    def __init__(self, work: VocoderPass, captures: bool) -> None:
        self._work = work
        self._graphs = self._captured() if captures else {}

    def _captured(self) -> Mapping[tuple[int, int], CapturedWork[PassTensors, None]]:
        sizes, work, pool = self._sizes(), self._work, GraphPool()
        shared = work.tensors(*map(max, zip(*sizes, strict=True)))
        places = {size: shared.part(size[0], work.width(size[1]), work.samples(size[1])) for size in sizes}
        return {size: CapturedWork(each, partial(work, each), pool) for size, each in places.items()}

    def _sizes(self) -> list[tuple[int, int]]:
        """Batches and lengths, the largest first, whose memory the others use again."""
        context = self._work.reach.context
        sizes = [(batch, length) for length in LENGTHS for batch in BATCHES if batch * (context + length) <= PASS_ROWS]
        return sorted(sizes, key=lambda size: -size[0] * (context + size[1]))

    def __call__(
        self, states: Sequence[StreamState], codes: Sequence[np.ndarray]
    ) -> list[tuple[torch.Tensor, StreamState]]:
        """Codes `[n, Q]` of each stream, at most `PASS_CODES` -> the wave of them, and the stream's state behind them.

        Both are copies: a state would keep the memory of all others of its pass.
        """
        made: dict[int, tuple[torch.Tensor, StreamState]] = {}
        for places in passes([len(each) for each in codes], self._work.reach.context):
            of_pass = self._pass([states[place] for place in places], [codes[place] for place in places])
            made.update(zip(places, of_pass, strict=True))
        nothing = self._work.weight.new_zeros(0)
        return [made.get(place, (nothing, state)) for place, state in enumerate(states)]

    def _pass(
        self, states: Sequence[StreamState], codes: Sequence[np.ndarray]
    ) -> Iterator[tuple[torch.Tensor, StreamState]]:
        tensors = self._run(states, codes)
        reach, ranges = self._work.reach, []
        for state, each in zip(states, codes, strict=True):
            context = min(state.count, reach.context)
            ranges.append(slice(reach.samples(context), reach.samples(context + len(each))))
        waves = copies([wave[range_] for wave, range_ in zip(tensors.waves, ranges, strict=False)])
        kept = copies([*tensors.kept[: len(states)], *tensors.rows[: len(states)]])
        for place, (state, each) in enumerate(zip(states, codes, strict=True)):
            yield waves[place], StreamState(state.count + len(each), kept[place], kept[len(states) + place])

    def _run(self, states: Sequence[StreamState], codes: Sequence[np.ndarray]) -> PassTensors:
        longest = max(map(len, codes))
        size = size_at_least(len(codes), BATCHES), size_at_least(longest, LENGTHS)
        graph = self._graphs.get(size)  # type: ignore[arg-type]
        tensors = self._work.tensors(len(codes), longest) if graph is None else graph.inputs
        tensors.fill(states, codes)
        self._work(tensors) if graph is None else graph.replay()
        return tensors


def passes(lengths: Sequence[int], context: int) -> list[list[int]]:
    """Places of the pieces that share a pass, of `PASS_ROWS` at most; pieces without codes are in none."""
    by_size: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        if length:
            by_size.setdefault(size_at_least(length, LENGTHS) or length, []).append(place)
    return [batch for size, places in by_size.items() for batch in batches(places, most_pieces(context + size))]


def most_pieces(rows: int) -> int:
    """Of so many rows each in one pass."""
    return max(batch for batch in BATCHES if batch == 1 or batch * rows <= PASS_ROWS)


def batches(places: Sequence[int], most: int) -> Iterator[list[int]]:
    for start in range(0, len(places), most):
        yield list(places[start : start + most])


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each in memory of its own; on CUDA a kernel copies many."""
    made = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
    torch._foreach_copy_(made, list(tensors))
    return made


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that waits for nothing the device has to do before it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
