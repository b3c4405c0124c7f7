"""Rows out of and into every step of vLLM's V1 model runner, on CUDA and CPU alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.outputs import SamplerOutput

from omni_cluster.config.engine_args import OmniModelConfig
from omni_cluster.inputs import StageExtra
from omni_cluster.worker.further_steps import FurtherSteps
from omni_cluster.worker.model_input import NOWHERE, OmniModelInputBuilder, OmniModelInputForGPU, TokenSpan
from omni_cluster.worker.rows_out import RowsOfStep
from omni_cluster.worker.seen_tokens import SeenTokens, plain_repetition
from omni_cluster.worker.top_k_sampler import TopKSampler

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _Runner
else:
    _Runner = object

HIDDEN_STATES = "hidden_states"


class OmniGPUModelRunner(_Runner):
    """Mixin over vLLM's `GPUModelRunner` (V1) or its CPU twin.

    Rows in: before a step, the model's static buffer `extra_rows` `[max_num_batched_tokens, H]` is filled for the
    step's positions; the model adds it to its token embeddings, inside CUDA graphs too. Rows out: `take_rows` gives,
    for the requests that want them, the sum of last hidden state and token embedding of each computed position.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.omni_config = OmniModelConfig.of(self.vllm_config)
        self._emitting: set[str] = set()
        self._multimodal_mask: torch.Tensor | None = None
        self._embeddings: torch.Tensor | None = None
        self._inputs: OmniModelInputBuilder | None = None
        self._further_steps: FurtherSteps | None = None
        self._further: dict[str, int] = {}
        self.sampler.topk_topp_sampler = TopKSampler(self.sampler.topk_topp_sampler, self._top_k_of_batch)
        self._seen = SeenTokens(self.max_num_reqs, self.model_config.get_vocab_size(), self.device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.omni_config.takes_rows:
            buffer = self.get_model().extra_rows
            num_rows = buffer.shape[0] + (self.omni_config.max_decode_steps - 1) * self.max_num_reqs
            is_cuda = self.device.type == "cuda"
            staging = torch.zeros(num_rows, buffer.shape[1], dtype=buffer.dtype, pin_memory=is_cuda)
            self._inputs = OmniModelInputBuilder(staging, self.omni_config.max_payload_elements)
            self._further_steps = FurtherSteps(self)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        for request_id in scheduler_output.finished_req_ids:
            self._forget(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            params = new.sampling_params
            extra = StageExtra.of(params.extra_args if params else None)
            if extra is not None:
                self._admit(new.req_id, extra)
            if plain_repetition(params):
                self._seen.admit(new.req_id, new.prompt_token_ids or ())
        for request_id, rows in getattr(scheduler_output, "omni_rows", ()):
            if self._inputs is not None:
                self._inputs.push(request_id, rows)
        for request_id in scheduler_output.preempted_req_ids or ():
            self._seen.remove(request_id)  # there is room for those that run, not for all that wait
        self._further = getattr(scheduler_output, "omni_further", {})
        updated = super()._update_states(scheduler_output)
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            state = self.requests[request_id]
            if plain_repetition(state.sampling_params):
                known = [token for token in state.output_token_ids if token >= 0]  # not vLLM's placeholders
                self._seen.admit(request_id, [*state.prompt_token_ids, *known])
        return updated

    def _admit(self, request_id: str, extra: StageExtra) -> None:
        if extra.emit_rows:
            self._emitting.add(request_id)
        if self._inputs is not None:
            self._inputs.admit(request_id, extra)

    def _forget(self, request_id: str) -> None:
        self._emitting.discard(request_id)
        self._seen.remove(request_id)
        if self._inputs is not None:
            self._inputs.remove(request_id)

    def _init_mrope_positions(self, req_state: Any) -> None:
        positions = self._inputs.positions(req_state.req_id) if self._inputs is not None else None
        if positions is None:
            super()._init_mrope_positions(req_state)
            return
        req_state.mrope_positions = positions
        req_state.mrope_position_delta = int(positions.max()) + 1 - positions.shape[1]

    def _gather_mm_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        embeddings, mask = super()._gather_mm_embeddings(*args, **kwargs)
        self._multimodal_mask = mask
        return embeddings, mask

    def _preprocess(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        if self._inputs is not None:
            self._feed(self._inputs.build(self._spans(scheduler_output)))
        inputs = super()._preprocess(scheduler_output, *args, **kwargs)
        if self._emits(scheduler_output):
            self._embeddings = self._text_embeddings(scheduler_output.total_num_scheduled_tokens)
        return inputs

    def _emits(self, scheduler_output: SchedulerOutput) -> bool:
        """Whether this rank makes rows in this step: the first of a tensor-parallel group, whose output is read."""
        wanted = not self._emitting.isdisjoint(scheduler_output.num_scheduled_tokens)
        return wanted and get_tp_group().rank_in_group == 0

    def _spans(self, scheduler_output: SchedulerOutput) -> list[TokenSpan]:
        """The positions of each request in this step, in the batch's order."""
        computed = self.input_batch.num_computed_tokens_cpu
        scheduled = scheduler_output.num_scheduled_tokens
        return [TokenSpan(r, int(computed[i]), scheduled[r]) for i, r in enumerate(self.input_batch.req_ids)]

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        """Samples as vLLM does, and goes on where the scheduler left room for it: int32 `[n, tokens]`."""
        if logits is None:
            return super()._sample(logits, spec_decode_metadata)
        batch = self.input_batch
        discarded = self.discard_request_mask.gpu[: len(batch.req_ids)]
        output = self.sample_step(logits, discarded, batch.sampling_metadata.generators)
        if self._further_steps is None or not self._further or not self._goes_on():
            return output
        tokens = self._further_steps.run(output.sampled_token_ids, self._further)
        return replace(output, sampled_token_ids=tokens)

    def _goes_on(self) -> bool:
        """Whether the batch's next logits need nothing that only the host knows after a step."""
        metadata = self.input_batch.sampling_metadata
        return self._penalties_are_plain() and metadata.max_num_logprobs is None and not metadata.bad_words_token_ids

    def sample_step(
        self, logits: torch.Tensor, discarded: torch.Tensor, generators: dict[int, torch.Generator]
    ) -> SamplerOutput:
        """Samples one token a request as vLLM does, the repetition penalty on the device where it is all there is.

        `logits` `[n, vocab_size]`; `discarded` bool `[n]`: requests whose token is not theirs to keep; `generators`: by
        row, for requests that have a seed.
        """
        request_ids = self.input_batch.req_ids
        stock = self.input_batch.sampling_metadata
        if self.input_batch.repetition_penalties_reqs and self._penalties_are_plain():
            logits = logits.float()
            self._seen.penalise(logits, request_ids, stock.repetition_penalties)
            plain = replace(stock, no_penalties=True, output_token_ids=[], generators=generators)
        else:
            plain = replace(stock, generators=generators)
        self.input_batch.sampling_metadata = plain
        try:
            output = super()._sample(logits, None)
        finally:
            self.input_batch.sampling_metadata = stock
        if len(self._seen):
            self._seen.note(request_ids, output.sampled_token_ids[:, 0], discarded)
        return output  # type: ignore[no-any-return]

    def fill_rows(self, request_ids: Sequence[str], positions: np.ndarray) -> None:
        """Feeds each request's row at `positions` int `[n]`, -1 for one that the step computes to no effect."""
        spans = [TokenSpan(r, int(p) if p >= 0 else NOWHERE, 1) for r, p in zip(request_ids, positions, strict=True)]
        if self._inputs is not None:
            self._feed(self._inputs.build(spans, is_further=True))

    def _feed(self, step: OmniModelInputForGPU) -> None:
        if step.changed:
            self.get_model().extra_rows[: step.rows.shape[0]].copy_(step.rows, non_blocking=True)

    def _top_k_of_batch(self) -> np.ndarray:
        return self.input_batch.top_k_cpu[: self.input_batch.num_reqs]

    def _penalties_are_plain(self) -> bool:
        """Whether every penalty of the batch is one that `SeenTokens` knows."""
        batch = self.input_batch
        others = batch.frequency_penalties_reqs or batch.presence_penalties_reqs or batch.bad_words_token_ids
        return not others and all(map(self._seen.tracks, batch.repetition_penalties_reqs))

    def take_rows(self) -> RowsOfStep | None:
        """The rows of the step that was just executed, on the device; None when no request of it wants rows."""
        embeddings, self._embeddings = self._embeddings, None
        state = self.execute_model_state
        if state is None or embeddings is None:
            return None
        rows = embeddings.add_(state.hidden_states[: embeddings.shape[0]])
        return RowsOfStep.of(rows, self._spans(state.scheduler_output), self._emitting, self._prompt_positions)

    def _text_embeddings(self, num_tokens: int) -> torch.Tensor:
        """Token embeddings of the step, zero at audio, image and video positions; a tensor of its own.

        Taken before the forward pass: on CUDA it uses this input as its residual stream and writes over it.
        """
        embeddings = self.inputs_embeds.gpu[:num_tokens]
        mask = self._multimodal_mask
        if mask is None or not bool(mask.any()):
            return embeddings.clone()
        return embeddings.masked_fill(mask[:num_tokens].to(embeddings.device, non_blocking=True).unsqueeze(-1), 0)

    def _prompt_positions(self, request_id: str) -> torch.Tensor | None:
        request = self.requests[request_id]
        positions = request.mrope_positions
        return None if positions is None else positions[:, : request.num_prompt_tokens].long()
