"""The penalties of a batch, each request's by itself and all on the device.

vLLM's V1 runner applies penalties from lists of token ids on the host: as soon as one request of a batch has one, every
step waits for the tokens of the step before it, and copies all tokens of all requests to the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm import SamplingParams
from vllm.v1.sample.metadata import SamplingMetadata

from omni_cluster.vllm_engine.worker.output_counts import OutputCounts
from omni_cluster.vllm_engine.worker.seen_tokens import SeenTokens


class Penalties:
    """What requests have seen and made, as far as their penalties ask for it."""

    def __init__(self, max_requests: int, vocab_size: int, device: torch.device) -> None:
        self._seen = SeenTokens(max_requests, vocab_size, device)
        self._made = OutputCounts(vocab_size, device)

    def admit(
        self, request_id: str, params: SamplingParams | None, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> None:
        """Starts a request over with the tokens it has."""
        if params is None:
            return
        if params.repetition_penalty != 1.0:
            self._seen.admit(request_id, [*prompt_ids, *output_ids])
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            self._made.admit(request_id, output_ids)

    def remove(self, request_id: str) -> None:
        self._seen.remove(request_id)
        self._made.remove(request_id)

    def apply(self, logits: torch.Tensor, request_ids: list[str], metadata: SamplingMetadata) -> None:
        """Penalises float32 `logits` `[n, vocab_size]` in place, in vLLM's order."""
        if metadata.no_penalties:
            return
        if len(self._seen):
            self._seen.penalise(logits, request_ids, metadata.repetition_penalties)
        if len(self._made):
            self._made.penalise(logits, request_ids, metadata.frequency_penalties, metadata.presence_penalties)

    def note(self, request_ids: list[str], sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        """Adds a step's `sampled` tokens, int `[n]`; not those of requests that `discarded`, bool `[n]`, names."""
        if len(self._seen):
            self._seen.note(request_ids, sampled, discarded)
        self._made.note(request_ids, sampled, discarded)
