"""The conditioning rows of one step: those, or ids, that it has beside its tokens, and those that it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from omni_cluster.types.inputs import StageExtra
from omni_cluster.types.rows import IDS, NO_ID, PrefixHashes, Rows, check_together
from omni_cluster.vllm_engine.rows_at import unless_all
from omni_cluster.vllm_engine.worker.finite import finite_rows


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """The positions of one request that one step computes: `[start, start + length)`."""

    request_id: str
    start: int
    length: int

    def one(self, number: int) -> TokenSpan:
        """Its position number `number`, `NOWHERE` if it has less."""
        return TokenSpan(self.request_id, self.start + number if number < self.length else NOWHERE, 1)


NOWHERE = 1 << 62
"""A position behind all rows, for a request that a step computes to no effect."""


class RequestRows:
    """The rows of one request, growing while it decodes; positions past the last row take the pad row.

    The first row is that of position `start`; the KV cache has what is before it. `positions`: see `Rows`.
    """

    def __init__(
        self,
        start: int,
        rows: torch.Tensor,
        pad_row: torch.Tensor,
        no_row: torch.Tensor,
        positions: torch.Tensor | None = None,
    ) -> None:
        """`pad_row` and `no_row` `[1, H]`; `no_row`: of positions between `rows` that have none."""
        self._start = start
        self._length = rows.shape[0]
        self._rows = rows
        self._pad_row = pad_row
        self._no_row = no_row
        self.positions = positions

    def append(self, start: int, rows: torch.Tensor) -> None:
        """Rows from position `start` on, which is behind all that it has."""
        first = start - self._start
        end = first + rows.shape[0]
        if end > self._rows.shape[0]:
            self.reserve(max(end, 2 * self._rows.shape[0]))
        self._rows[self._length : first] = self._no_row
        self._rows[first:end] = rows
        self._length = end

    def skip_to(self, position: int) -> None:
        """No row belongs to the positions before `position` that have none yet."""
        if self._pad_row is not self._no_row:
            self.append(position, self._no_row[:0])

    def reserve(self, number: int) -> None:
        """Makes room for so many rows."""
        if number > self._rows.shape[0]:
            grown = self._rows.new_empty(number, self._rows.shape[1])
            grown[: self._length] = self._rows[: self._length]
            self._rows = grown

    def only_pads(self, span: TokenSpan) -> bool:
        return span.start >= self._start + self._length

    def pieces(self, span: TokenSpan) -> list[torch.Tensor]:
        """The span's rows, as views of at most two tensors."""
        first = span.start - self._start
        if first < 0:
            raise RuntimeError(f"position {span.start} is to be computed, but the hidden states begin at {self._start}")
        end = first + span.length
        if end <= self._length:
            return [self._rows[first:end]]
        pads = self._pad_row.expand(end - max(first, self._length), -1)
        return [pads] if self.only_pads(span) else [self._rows[first : self._length], pads]


class OmniModelInputBuilder:
    """Keeps the rows of all requests of a runner and lays out those that a step needs.

    With `takes_ids` it keeps their ids in place of rows, `[n, 1]`. Each ignores what the other one keeps.
    `staging` `[n, H]` is reused by every step: the runner must have finished the copy of the step before, which vLLM's
    `synchronize_input_prep` gives. Its further steps come behind it, so n is what all of them take together.
    """

    def __init__(self, staging: torch.Tensor, max_elements: int, *, takes_ids: bool = False) -> None:
        self._staging = staging
        self._max_elements = max_elements
        self._takes_ids = takes_ids
        self._requests: dict[str, RequestRows] = {}
        self._no_row = staging.new_full((1, staging.shape[1]), NO_ID if takes_ids else 0)
        self._padded: list[tuple[str, int]] = []
        self._staged = 0

    def admit(self, request_id: str, extra: StageExtra, expected: int = 0) -> None:
        """Takes a new request's first rows of `expected` ones, or more; one that comes again keeps those it has."""
        if not extra.rows or request_id in self._requests:
            return
        parts = [Rows.unpack(packed, max_elements=self._max_elements) for packed in extra.rows]
        check_together(parts, self._max_elements)
        first, begins_with = parts[0], self._keeps(parts[0])
        rows = self._staged_rows(first) if begins_with else self._no_row[:0]
        positions = None if first.positions is None else torch.from_numpy(first.positions)
        request = RequestRows(first.start, rows, self._pad_row(extra), self._no_row, positions)
        if any(map(self._keeps, parts)):
            request.reserve(expected - first.start)
        for part in parts[begins_with:]:
            self._append(request, part)
        self._requests[request_id] = request

    def _keeps(self, rows: Rows) -> bool:
        return (rows.kind == IDS) == self._takes_ids

    def _staged_rows(self, rows: Rows) -> torch.Tensor:
        return rows.tensor().to(self._staging.dtype)

    def _pad_row(self, extra: StageExtra) -> torch.Tensor:
        pad_row = Rows.unpack(extra.pad_row, max_elements=self._max_elements) if extra.pad_row else None
        return self._no_row if pad_row is None or not self._keeps(pad_row) else self._staged_rows(pad_row)[:1]

    def push(self, request_id: str, rows: Rows) -> None:
        """Appends rows to a request; those of a request that ended meanwhile are dropped."""
        request = self._requests.get(request_id)
        if request is not None:
            self._append(request, rows)

    def _append(self, request: RequestRows, rows: Rows) -> None:
        if self._keeps(rows):
            request.append(rows.start, self._staged_rows(rows))
        else:
            request.skip_to(rows.end)

    def remove(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def positions(self, request_id: str) -> torch.Tensor | None:
        """The M-RoPE positions `[3, P]` that came with the request, None where vLLM's own serve."""
        request = self._requests.get(request_id)
        return None if request is None else request.positions

    def build(self, spans: Sequence[TokenSpan], *, is_further: bool = False) -> torch.Tensor | None:
        """Rows `[num_tokens, H]` of every position of the step, on the host; zero, or `NO_ID`, where there are none.

        None where they are those of the step before, as of requests that are all past their last rows. `is_further`:
        what was built before is still on its way to the device.
        """
        first = self._staged if is_further else 0
        num_tokens = sum(span.length for span in spans)
        padded = [(span.request_id, span.length) for span in spans if self._only_pads(span)]
        unchanged = len(padded) == len(spans) and padded == self._padded
        self._padded = padded if len(padded) == len(spans) else []
        self._staged = first + num_tokens
        if unchanged:
            return None
        rows = self._staging[first : self._staged]
        return torch.cat([piece for span in spans for piece in self._pieces(span)], out=rows)

    def _only_pads(self, span: TokenSpan) -> bool:
        request = self._requests.get(span.request_id)
        return request is not None and request.only_pads(span)

    def _pieces(self, span: TokenSpan) -> list[torch.Tensor]:
        request = self._requests.get(span.request_id)
        return [self._no_row.expand(span.length, -1)] if request is None else request.pieces(span)

    def __len__(self) -> int:
        return len(self._requests)


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """What goes with a request's first rows: see `Rows`. `positions`: int64 `[3, P]`."""

    positions: torch.Tensor | None = None
    prefix: PrefixHashes | None = None


NO_FACTS = PromptFacts()


@dataclass(frozen=True, slots=True)
class EmittedPart:
    """What of a step has rows that go out, where those of some positions do.

    `spans`: of requests that emit rows, as far as their prompts go. `masks` bool `[length]`, by request: which of the
    span's positions have rows. `places` int64 `[n]`: which of the step's positions, over all of its spans.
    """

    spans: Sequence[TokenSpan]
    masks: Mapping[str, np.ndarray]
    places: np.ndarray

    @classmethod
    def of(cls, step: Sequence[TokenSpan], prompts: Mapping[str, np.ndarray]) -> EmittedPart:
        """Of the `step`'s spans. `prompts` bool `[P]`: the masks of whole prompts, of requests that emit rows."""
        spans, masks = list[TokenSpan](), dict[str, np.ndarray]()
        goes_out, first = np.zeros(sum(span.length for span in step), np.bool_), 0
        for span in step:
            mask = prompts.get(span.request_id, goes_out[:0])[span.start :][: span.length]
            if len(mask):
                spans.append(replace(span, length=len(mask)))
                masks[span.request_id] = goes_out[first : first + len(mask)] = mask
            first += span.length
        return cls(spans, masks, np.flatnonzero(goes_out))


@dataclass
class OmniModelRunnerOutput(ModelRunnerOutput):
    """vLLM's output of a step with, for each request that wants them, its packed rows in `pooler_output`.

    The stock scheduler forwards `pooler_output[i]` next to request i's tokens, for generating requests too.
    """

    @classmethod
    def with_rows(cls, output: ModelRunnerOutput, made: dict[str, Rows | None]) -> OmniModelRunnerOutput:
        """`made`: None for a request with rows that are not finite, which counts as one whose logits are not."""
        of_each = [made.get(request_id) for request_id in output.req_ids]
        packed = [None if rows is None else torch.from_numpy(rows.pack()) for rows in of_each]
        broken = {request_id: 1 for request_id, rows in made.items() if rows is None}
        nans = {**(output.num_nans_in_logits or {}), **broken}
        return cls(**{**vars(output), "pooler_output": packed, "num_nans_in_logits": nans})


@dataclass(frozen=True, slots=True)
class RowsOfStep:
    """Device rows `[n, H]` of a step, of all its `spans` in order; `finite` bool `[n]`, on the device too.

    `rows` is a tensor of its own: under CUDA graphs the next replay overwrites the model's static output. `kind`: the
    family's name of them. `facts`: by request that wants its rows, what goes with them. `masks`: see `EmittedPart`; a
    request without one has a row at each position.
    """

    kind: str
    rows: torch.Tensor
    finite: torch.Tensor
    spans: Sequence[TokenSpan]
    facts: Mapping[str, PromptFacts]
    masks: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        kind: str,
        rows: torch.Tensor,
        spans: Sequence[TokenSpan],
        facts: Mapping[str, PromptFacts],
        masks: Mapping[str, np.ndarray] | None = None,
    ) -> RowsOfStep:
        return cls(kind, rows, finite_rows(rows), spans, facts, masks or {})

    def by_request(self, host_rows: torch.Tensor, finite: torch.Tensor) -> dict[str, Rows | None]:
        """The rows of each request that wants them; None for one with a row that is not finite."""
        all_finite, made, first = finite.tolist(), dict[str, Rows | None](), 0
        for span in self.spans:
            mask = self.masks.get(span.request_id)
            end = first + (span.length if mask is None else int(mask.sum()))
            if span.request_id in self.facts:
                is_finite = all(all_finite[first:end])
                made[span.request_id] = self._rows(span, host_rows[first:end]) if is_finite else None
            first = end
        return made

    def _rows(self, span: TokenSpan, rows: torch.Tensor) -> Rows:
        facts = self.facts[span.request_id]
        positions = None if facts.positions is None else facts.positions.cpu().numpy()
        mask = unless_all(self.masks.get(span.request_id))
        return Rows.of(self.kind, span.start, rows, positions, facts.prefix, mask)

    def attach_to(self, output: ModelRunnerOutput) -> OmniModelRunnerOutput:
        """Copies the rows to the host now and adds them to the output."""
        return OmniModelRunnerOutput.with_rows(output, self.by_request(self.rows.cpu(), self.finite.cpu()))


class PinnedBuffers:
    """Page-locked host buffers that are used again: one step in flight takes one and gives it back."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """A uint8 buffer of at least `num_bytes`."""
        for i, buffer in enumerate(self._free):
            if buffer.numel() >= num_bytes:
                return self._free.pop(i)
        if self._free:
            self._free.pop()
        return torch.empty(1 << (num_bytes - 1).bit_length(), dtype=torch.uint8, pin_memory=True)

    def give_back(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)


class AsyncRowsOutput(AsyncModelRunnerOutput):
    """A step's output whose rows travel to the host on a side stream, while the next step already runs."""

    def __init__(
        self, inner: AsyncModelRunnerOutput, step: RowsOfStep, stream: torch.cuda.Stream, buffers: PinnedBuffers
    ) -> None:
        self._inner = inner
        self._step = step
        self._buffers = buffers
        self._buffer = buffers.take(step.rows.nbytes)
        self._host_rows = self._buffer[: step.rows.nbytes].view(step.rows.dtype).view(step.rows.shape)
        self._copied = torch.cuda.Event()
        main = torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            stream.wait_stream(main)
            self._host_rows.copy_(step.rows, non_blocking=True)
            self._finite = step.finite.to("cpu", non_blocking=True)
            self._copied.record()

    def get_output(self) -> ModelRunnerOutput:
        """Waits for the copy; packing gives each request bytes of its own, so the pinned buffer is free again."""
        output = self._inner.get_output()
        self._copied.synchronize()
        output = OmniModelRunnerOutput.with_rows(output, self._step.by_request(self._host_rows, self._finite))
        self._buffers.give_back(self._buffer)
        return output
