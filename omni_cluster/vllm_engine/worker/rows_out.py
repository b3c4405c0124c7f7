"""The conditioning rows of one step on their way from the device to the requests' outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from omni_cluster.rows import PrefixHashes, Rows
from omni_cluster.vllm_engine.worker.finite import finite_rows
from omni_cluster.vllm_engine.worker.model_input import TokenSpan


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """What goes with a request's first rows: see `Rows`. `positions`: int64 `[3, P]` on the CPU."""

    positions: torch.Tensor | None = None
    prefix: PrefixHashes | None = None


NO_FACTS = PromptFacts()


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
    family's name of them. `facts`: by request that wants its rows, what goes with them.
    """

    kind: str
    rows: torch.Tensor
    finite: torch.Tensor
    spans: Sequence[TokenSpan]
    facts: Mapping[str, PromptFacts]

    @classmethod
    def of(
        cls, kind: str, rows: torch.Tensor, spans: Sequence[TokenSpan], facts: Mapping[str, PromptFacts]
    ) -> RowsOfStep:
        return cls(kind, rows, finite_rows(rows), spans, facts)

    def by_request(self, host_rows: torch.Tensor, finite: torch.Tensor) -> dict[str, Rows | None]:
        """The rows of each request that wants them; None for one with a row that is not finite."""
        all_finite, made, first = finite.tolist(), dict[str, Rows | None](), 0
        for span in self.spans:
            end = first + span.length
            if span.request_id in self.facts:
                is_finite = all(all_finite[first:end])
                made[span.request_id] = self._rows(span, host_rows[first:end]) if is_finite else None
            first = end
        return made

    def _rows(self, span: TokenSpan, rows: torch.Tensor) -> Rows:
        facts = self.facts[span.request_id]
        positions = None if facts.positions is None else facts.positions.numpy()
        return Rows.of(self.kind, span.start, rows, positions, facts.prefix)

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
