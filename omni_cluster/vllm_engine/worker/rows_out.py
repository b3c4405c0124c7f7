"""The conditioning rows of one step on their way from the device to the requests' outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from omni_cluster.rows import PrefixHashes, RowsChunk
from omni_cluster.vllm_engine.worker.finite import finite_rows
from omni_cluster.vllm_engine.worker.model_input import TokenSpan


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """What goes with a request's first rows: see `RowsChunk`."""

    positions: torch.Tensor | None = None
    prefix: PrefixHashes | None = None


NO_FACTS = PromptFacts()


@dataclass(frozen=True, slots=True)
class EmittedSpan:
    """Rows `[offset, offset + length)` of the step belong to one request, from absolute position `start` on."""

    request_id: str
    start: int
    offset: int
    length: int
    facts: PromptFacts

    @property
    def end(self) -> int:
        return self.offset + self.length

    def chunk(self, host_rows: torch.Tensor) -> RowsChunk:
        rows = host_rows[self.offset : self.end]
        return RowsChunk(self.start, rows, self.facts.positions, prefix=self.facts.prefix)


@dataclass
class OmniModelRunnerOutput(ModelRunnerOutput):
    """vLLM's output of a step with, for each request that wants them, its packed `RowsChunk` in `pooler_output`.

    The stock scheduler forwards `pooler_output[i]` next to request i's tokens, for generating requests too.
    """

    @classmethod
    def with_rows(cls, output: ModelRunnerOutput, chunks: dict[str, RowsChunk | None]) -> OmniModelRunnerOutput:
        """`chunks`: None for a request with rows that are not finite, which counts as one whose logits are not."""
        packed = [chunk.pack() if (chunk := chunks.get(r)) is not None else None for r in output.req_ids]
        broken = {r: 1 for r, chunk in chunks.items() if chunk is None}
        nans = {**(output.num_nans_in_logits or {}), **broken}
        return cls(**{**vars(output), "pooler_output": packed, "num_nans_in_logits": nans})


@dataclass(slots=True)
class RowsOfStep:
    """Device rows `[n, H]` of a step and which of them go to which request; `finite` bool `[n]`, on the device too.

    `rows` is a tensor of its own: under CUDA graphs the next replay overwrites the model's static output.
    """

    rows: torch.Tensor
    finite: torch.Tensor
    spans: list[EmittedSpan]

    @classmethod
    def of(
        cls,
        rows: torch.Tensor,
        spans: Sequence[TokenSpan],
        emitting: Collection[str],
        facts_of: Callable[[str], PromptFacts],
    ) -> RowsOfStep:
        """`facts_of`: what goes with a request's rows of this step, nothing if they are not its first."""
        emitted, offset = [], 0
        for span in spans:
            if span.request_id in emitting:
                facts = facts_of(span.request_id)
                emitted.append(EmittedSpan(span.request_id, span.start, offset, span.length, facts))
            offset += span.length
        return cls(rows, finite_rows(rows), emitted)

    def chunks(self, host_rows: torch.Tensor, finite: torch.Tensor) -> dict[str, RowsChunk | None]:
        """By request; None for one with a row that is not finite."""
        all_finite = finite.tolist()
        return {
            span.request_id: span.chunk(host_rows) if all(all_finite[span.offset : span.end]) else None
            for span in self.spans
        }

    def attach_to(self, output: ModelRunnerOutput) -> OmniModelRunnerOutput:
        """Copies the rows to the host now and adds them to the output."""
        return OmniModelRunnerOutput.with_rows(output, self.chunks(self.rows.cpu(), self.finite.cpu()))


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
        output = OmniModelRunnerOutput.with_rows(output, self._step.chunks(self._host_rows, self._finite))
        self._buffers.give_back(self._buffer)
        return output
