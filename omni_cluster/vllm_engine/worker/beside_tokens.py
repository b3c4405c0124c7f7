"""What the positions of a step have beside their tokens, in the model's buffers: rows, ids, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from omni_cluster.types.inputs import StageExtra
from omni_cluster.types.rows import Rows
from omni_cluster.vllm_engine.engine_args import OmniModelConfig
from omni_cluster.vllm_engine.worker.step_rows import OmniModelInputBuilder, TokenSpan


class BesideTokens:
    """The model's buffers `extra_rows` and `extra_ids`, as far as it has them, and what comes into each."""

    def __init__(self, model: Any, config: OmniModelConfig, max_requests: int) -> None:
        self._filled: list[tuple[torch.Tensor, OmniModelInputBuilder]] = []
        further = (config.max_decode_steps - 1) * max_requests
        if config.takes_rows:
            self._fill(model.extra_rows, further, config.max_payload_elements)
        if config.takes_ids:
            self._fill(model.extra_ids.unsqueeze(1), further, config.max_payload_elements, takes_ids=True)

    def _fill(self, buffer: torch.Tensor, further: int, max_elements: int, *, takes_ids: bool = False) -> None:
        shape = (len(buffer) + further, buffer.shape[1])
        staging = torch.zeros(shape, dtype=buffer.dtype, pin_memory=buffer.is_cuda)
        self._filled.append((buffer, OmniModelInputBuilder(staging, max_elements, takes_ids=takes_ids)))

    def admit(self, request_id: str, extra: StageExtra, expected: int) -> None:
        """See `OmniModelInputBuilder.admit`, as of the others."""
        for _, builder in self._filled:
            builder.admit(request_id, extra, expected)

    def push(self, request_id: str, rows: Rows) -> None:
        for _, builder in self._filled:
            builder.push(request_id, rows)

    def remove(self, request_id: str) -> None:
        for _, builder in self._filled:
            builder.remove(request_id)

    def positions(self, request_id: str) -> torch.Tensor | None:
        return self._filled[0][1].positions(request_id)

    def feed(self, spans: Sequence[TokenSpan], *, is_further: bool = False) -> None:
        """Fills the buffers for a step. What is as in the step before is there already."""
        for buffer, builder in self._filled:
            rows = builder.build(spans, is_further=is_further)
            if rows is not None:
                buffer[: len(rows)].copy_(rows, non_blocking=True)
