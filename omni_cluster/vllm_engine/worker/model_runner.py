"""Rows out of and into every step of vLLM's V1 model runner, on CUDA and CPU alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.sampling_params import SamplingType
from vllm.sequence import IntermediateTensors
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata

from omni_cluster.models.after_sampling import Sampled
from omni_cluster.models.seeded_noise import state_of
from omni_cluster.types.inputs import StageExtra
from omni_cluster.types.rows import PrefixHashes
from omni_cluster.vllm_engine.engine_args import OmniModelConfig
from omni_cluster.vllm_engine.rows_at import prompt_mask
from omni_cluster.vllm_engine.worker.beside_tokens import BesideTokens
from omni_cluster.vllm_engine.worker.finite import finite_logits
from omni_cluster.vllm_engine.worker.multi_step import MultiStepDecoder
from omni_cluster.vllm_engine.worker.penalties import Penalties
from omni_cluster.vllm_engine.worker.prefill_graphs import PrefillGraphs, can_capture_prefill
from omni_cluster.vllm_engine.worker.residual_codes import ResidualCodes
from omni_cluster.vllm_engine.worker.sampled_rows import NO_ROWS, SampledRows, on_device
from omni_cluster.vllm_engine.worker.step_rows import (
    NO_FACTS,
    NOWHERE,
    EmittedPart,
    PromptFacts,
    RowsOfStep,
    TokenSpan,
)
from omni_cluster.vllm_engine.worker.top_k_sampler import TopKSampler
from omni_cluster.vllm_engine.worker.warmed_kernels import aligned_only, compiled_only

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _Runner
else:
    _Runner = object


EMBEDDINGS = "omni_embeddings"
"""Beside the tensors that vLLM sends from one rank of a pipeline to the next."""


@dataclass(slots=True)
class RequestState:
    """What the runner knows of a request beside what vLLM does, from its first step until it is freed."""

    emits_rows: bool = False
    mask: np.ndarray | None = None
    """Of one that emits rows of some positions: see `prompt_mask`."""
    begins: bool = False
    """Whether its next rows are the first ones, or the first ones after a preemption."""
    prefix: PrefixHashes | None = None
    known: tuple[int, ...] = ()
    """Its output in another engine, until vLLM is given it."""
    noise: int | None = None
    """Of a seeded request: what its noise is made of."""

    @classmethod
    def of(cls, params: SamplingParams | None, extra: StageExtra | None) -> RequestState:
        is_seeded = params is not None and params.sampling_type == SamplingType.RANDOM_SEED
        noise = state_of(params.seed) if params is not None and is_seeded else None
        if extra is None:
            return cls(noise=noise)
        return cls(extra.emit_rows, begins=extra.emit_rows, known=extra.known, noise=noise)

    def emits(self, start: int) -> bool:
        """Whether it emits rows in a step that computes its positions from `start` on."""
        return self.emits_rows and (self.mask is None or start < len(self.mask))


class OmniGPUModelRunner(_Runner):
    """Mixin over vLLM's `GPUModelRunner` (V1) or its CPU twin.

    Rows in: before a step, the model's static buffer `extra_rows` `[max_num_batched_tokens, H]` is filled for the
    step's positions; the model adds it to its token embeddings, inside CUDA graphs too. A buffer `extra_ids` is filled
    likewise. Rows out: `take_rows` gives, for the requests that want them, what the model wrote to its buffer
    `rows_out`, or without one the sum of last hidden state and token embedding.
    """

    intermediate_tensors: IntermediateTensors | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with aligned_only():
            super().__init__(*args, **kwargs)
        self.omni_config = OmniModelConfig.of(self.vllm_config)
        self._states: dict[str, RequestState] = {}
        self._multimodal_mask: torch.Tensor | None = None
        self._embeddings: torch.Tensor | None = None
        self._rows_out: torch.Tensor | None = None
        self._inputs: BesideTokens | None = None
        self._multi_step: MultiStepDecoder | None = None
        self._residual: ResidualCodes | None = None
        self._hidden: torch.Tensor | None = None
        """Of the step that is sampled from, where the model makes residual codes."""
        self._further: dict[str, int] = {}
        heads = self.model_config.get_num_attention_heads(self.parallel_config)
        self._prefill_graphs = PrefillGraphs(heads // self.model_config.get_num_kv_heads(self.parallel_config))
        self._penalties = Penalties(self.max_num_reqs, self.model_config.get_vocab_size(), self.device)
        self._sampled_rows, self._ahead = NO_ROWS, 0
        self._finite: torch.Tensor | None = None
        """Of the step that is sampled from: bool `[n]`, whether all logits of each request are finite."""
        stock = self.sampler.topk_topp_sampler
        self.sampler.topk_topp_sampler = TopKSampler(stock, lambda: (self._sampled_rows, self._ahead))
        self.sampler.apply_penalties = self._penalised

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if hasattr(self.get_model(), "capture_encoders") and self._captures:
            self.get_model().capture_encoders()
        if self.omni_config.takes_rows or self.omni_config.takes_ids:
            self._inputs = BesideTokens(self.get_model(), self.omni_config, self.max_num_reqs)
            self._multi_step = MultiStepDecoder(self)
        if self.omni_config.has_rows_out:
            self._rows_out = self.get_model().rows_out
        if self.omni_config.has_residual_codes:
            # A token that is sampled at the last position has one behind it.
            most = self.model_config.max_model_len + 1
            self._residual = ResidualCodes(self.get_model(), self.max_num_reqs, most)
            if hasattr(self.get_model(), "capture_after_sampling") and self._captures:
                self.get_model().capture_after_sampling(self._captured_requests)

    @property
    def _captured_requests(self) -> list[int]:
        """Of the steps that vLLM captures with a token a request, and as many as there may be."""
        sizes = self.compilation_config.cudagraph_capture_sizes or ()
        return [*(size for size in sizes if size < self.max_num_reqs), self.max_num_reqs]

    @property
    def _captures(self) -> bool:
        return self.compilation_config.cudagraph_mode != CUDAGraphMode.NONE

    def capture_model(self) -> int:
        if self._captures:
            self._compile_steps()
        return super().capture_model()

    def _compile_steps(self) -> None:
        """What steps of one token a request launch of our kernels; vLLM's own are compiled as it captures them."""
        most = min(self.max_num_reqs, getattr(self.get_model(), "most_fused_requests", 0))
        sizes = self.compilation_config.cudagraph_capture_sizes or ()
        with compiled_only():
            for size in (size for size in sizes if size <= most):
                self._dummy_run(
                    size,
                    cudagraph_runtime_mode=CUDAGraphMode.NONE,
                    force_attention=True,
                    uniform_decode=True,
                    skip_eplb=True,
                    remove_lora=False,
                )

    def _check_and_update_cudagraph_mode(self, attention_backends: Any, kv_cache_groups: Any, **kwargs: Any) -> None:
        super()._check_and_update_cudagraph_mode(attention_backends, kv_cache_groups, **kwargs)
        if can_capture_prefill(attention_backends, kv_cache_groups, self.vllm_config):
            sizes = self.compilation_config.cudagraph_capture_sizes or ()
            self._prefill_graphs.plan(self.cudagraph_dispatcher, sizes)

    def _build_attention_metadata(self, *, max_query_len: int, **kwargs: Any) -> Any:
        planned = self._prefill_graphs.planned_tokens(max_query_len)
        return super()._build_attention_metadata(max_query_len=planned, **kwargs)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        for request_id in scheduler_output.finished_req_ids:
            self._forget(request_id)
        for request_id in scheduler_output.preempted_req_ids or ():
            self._set_aside(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            self._admit(new)
        for request_id, rows in getattr(scheduler_output, "omni_rows", ()):
            if self._inputs is not None:
                self._inputs.push(request_id, rows)
        self._further = getattr(scheduler_output, "omni_further", {})
        for request_id, prefix in getattr(scheduler_output, "omni_prefixes", {}).items():
            self._states[request_id].prefix = prefix
        for request_id, features in getattr(scheduler_output, "omni_media", {}).items():
            self.requests[request_id].mm_features = features
        updated = super()._update_states(scheduler_output)
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._bring_back(request_id)
        # Noise is made of seeds. vLLM would set these back where a token is not kept, which those of a CPU cannot be.
        self.input_batch.generators.clear()
        return updated

    def _set_aside(self, request_id: str) -> None:
        """Of a request that is preempted: there is room for those that run, not for all that wait."""
        self._penalties.remove(request_id)
        if self._residual is not None:
            self._residual.set_aside(request_id)

    def _bring_back(self, request_id: str) -> None:
        self._states[request_id].begins = True
        if self._residual is not None:
            self._residual.bring_back(request_id)
        state = self.requests[request_id]
        known = [token for token in state.output_token_ids if token >= 0]  # not vLLM's placeholders
        self._penalties.admit(request_id, state.sampling_params, self._penalised_of(state.prompt_token_ids), known)

    def _admit(self, new: NewRequestData) -> None:
        params, prompt_ids = new.sampling_params, new.prompt_token_ids or ()
        extra = StageExtra.of(params.extra_args if params else None)
        state = self._states[new.req_id] = RequestState.of(params, extra)
        if state.emits_rows:
            state.mask = prompt_mask(self.omni_config.rows_at, len(prompt_ids), new.mm_features)
        self._penalties.admit(new.req_id, params, self._penalised_of(prompt_ids), state.known)
        if extra is not None and self._inputs is not None:
            self._inputs.admit(new.req_id, extra, len(prompt_ids))
        if self._residual is not None:
            known, of_prompt = (None, None) if extra is None else (extra.known_codes, extra.prompt_codes)
            self._residual.admit(new.req_id, len(prompt_ids), known, of_prompt)

    def _penalised_of(self, prompt_ids: Sequence[int] | None) -> Sequence[int]:
        return prompt_ids or () if self.omni_config.penalises_prompts else ()

    def _forget(self, request_id: str) -> None:
        self._states.pop(request_id, None)
        self._penalties.remove(request_id)
        if self._inputs is not None:
            self._inputs.remove(request_id)
        if self._residual is not None:
            self._residual.remove(request_id)

    def _init_mrope_positions(self, req_state: Any) -> None:
        # vLLM asks for these of each new request, before it takes the request into its batch.
        state = self._states[req_state.req_id]
        req_state.output_token_ids += state.known
        state.known = ()
        positions = self._inputs.positions(req_state.req_id) if self._inputs is not None else None
        if positions is None:
            super()._init_mrope_positions(req_state)
            return
        req_state.mrope_positions = positions
        delta = getattr(self.get_model(), "position_delta", _behind_the_largest)
        req_state.mrope_position_delta = delta(positions)

    def _gather_mm_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        embeddings, mask = super()._gather_mm_embeddings(*args, **kwargs)
        self._multimodal_mask = mask
        return embeddings, mask

    def execute_model(self, scheduler_output: SchedulerOutput, intermediate_tensors: Any = None) -> Any:
        """As vLLM does. Of a pipeline the first rank has the embeddings; they go on to the last, which makes rows."""
        if intermediate_tensors is not None:
            self._embeddings = intermediate_tensors.tensors.pop(EMBEDDINGS, None)
            self._make_room_for_states()
        output = super().execute_model(scheduler_output, intermediate_tensors)
        if isinstance(output, IntermediateTensors) and self._embeddings is not None:
            output.tensors[EMBEDDINGS], self._embeddings = self._embeddings, None
        return output

    def _make_room_for_states(self) -> None:
        """vLLM does it as it warms its kernels up, which a CPU without compilation leaves out."""
        if self.intermediate_tensors is None:
            make = self.get_model().make_empty_intermediate_tensors
            self.intermediate_tensors = make(self.max_num_tokens, self.model_config.dtype, self.device)

    def _preprocess(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        if self._inputs is not None or self._residual is not None:
            self._feed(self._spans(scheduler_output))
        inputs = super()._preprocess(scheduler_output, *args, **kwargs)
        if self._rows_out is None and get_pp_group().is_first_rank and self._emits():
            self._embeddings = self._text_embeddings(scheduler_output.total_num_scheduled_tokens)
        return inputs

    def _emits(self) -> bool:
        """Whether rows are made of this rank's embeddings, or of its buffer, in this step.

        Of a tensor-parallel group the first rank's output is read; what goes through a pipeline, all of them send.
        """
        computed = self.input_batch.num_computed_tokens_cpu
        wanted = any(self._states[r].emits(int(computed[i])) for i, r in enumerate(self.input_batch.req_ids))
        return wanted and (get_tp_group().rank_in_group == 0 or get_pp_group().world_size > 1)

    def _spans(self, scheduler_output: SchedulerOutput) -> list[TokenSpan]:
        """The positions of each request in this step, in the batch's order."""
        computed = self.input_batch.num_computed_tokens_cpu
        scheduled = scheduler_output.num_scheduled_tokens
        return [TokenSpan(r, int(computed[i]), scheduled[r]) for i, r in enumerate(self.input_batch.req_ids)]

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        """Samples as vLLM does, and goes on where the scheduler left room for it: int32 `[n, tokens]`."""
        if logits is None:
            return super()._sample(logits, spec_decode_metadata)
        further = self._going_on() if self._multi_step is not None else {}
        self._sampled_rows = self._rows_to_sample(1 + max(further.values(), default=0))
        if self._residual is not None:
            self._residual.begin(self._spans_to_make(further))
        discarded, hidden = self.discard_request_mask.gpu[: self.input_batch.num_reqs], self._hidden
        try:
            output = self.sample_step(logits, hidden, discarded)
            if self._multi_step is None or not further:
                return output
            tokens = self._multi_step.run(output.sampled_token_ids, further)
        finally:
            self._sampled_rows, self._hidden = NO_ROWS, None
        logprobs = _for_each(tokens.shape[1], output.logprobs_tensors)
        return replace(output, sampled_token_ids=tokens, logprobs_tensors=logprobs)

    def _going_on(self) -> dict[str, int]:
        """How many more tokens each request gets in this step: none for a request whose next token needs the host."""
        batch = self.input_batch
        waiting = {
            *batch.num_logprobs,
            *batch.logprob_token_ids,
            *(batch.req_ids[i] for i in batch.bad_words_token_ids),
        }
        return {r: number for r, number in self._further.items() if r not in waiting} if waiting else self._further

    def _spans_to_make(self, further: Mapping[str, int]) -> list[TokenSpan]:
        """The positions of the tokens that the step makes of each request; none of one in the midst of its prompt."""
        batch, discarded = self.input_batch, self.discard_request_mask.np
        ends = self.optimistic_seq_lens_cpu[: batch.num_reqs].tolist()
        return [
            TokenSpan(r, ends[i], 0 if discarded[i] else 1 + further.get(r, 0)) for i, r in enumerate(batch.req_ids)
        ]

    def sample_step(
        self, logits: torch.Tensor, hidden: torch.Tensor | None, discarded: torch.Tensor, ahead: int = 0
    ) -> SamplerOutput:
        """Samples one token a request as vLLM does, penalties and the noise of seeded requests on the device.

        `logits` `[n, vocab_size]`, of `hidden` `[n, H]`; `discarded` bool `[n]`: requests whose token is not kept;
        `ahead`: tokens that this step has made of each request before. The model's residual codes follow each token.
        """
        request_ids = self.input_batch.req_ids
        finite = finite_logits(logits)
        self._finite = finite & self._finite if ahead and self._finite is not None else finite
        stock = self.input_batch.sampling_metadata
        self.input_batch.sampling_metadata = self._without_waiting(stock, ahead)
        self._ahead = ahead
        try:
            output = super()._sample(logits, None)
        finally:
            self.input_batch.sampling_metadata = stock
        tokens = output.sampled_token_ids[:, 0]
        self._penalties.note(request_ids, tokens, discarded)
        if self._residual is not None and hidden is not None:
            rows, device = self._sampled_rows, self.device
            sampled = Sampled(hidden, tokens, on_device(rows.greedy, device), rows.keys_of(ahead, device))
            self._residual.make(sampled, ahead)
        return output  # type: ignore[no-any-return]

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM does, with its own count of a request's NaNs in place of a debugging variable's: 1 for any."""
        nans, nans_on_device, *others = super()._bookkeeping_sync(*args, **kwargs)
        finite, self._finite = self._finite, None
        if finite is not None and self.use_async_scheduling:
            nans_on_device = (~finite).int()
        elif finite is not None:
            nans = dict(zip(self.input_batch.req_ids, (~finite).int().tolist(), strict=True))
        return nans, nans_on_device, *others

    @staticmethod
    def _without_waiting(stock: SamplingMetadata, ahead: int) -> SamplingMetadata:
        """Without the tokens of the step before, which vLLM would wait for, and what only a step's first token has."""
        output_ids = stock.output_token_ids if stock.bad_words_token_ids else []
        if ahead:
            return replace(stock, output_token_ids=output_ids, max_num_logprobs=None, logprob_token_ids=None)
        return replace(stock, output_token_ids=output_ids)

    def _penalised(self, logits: torch.Tensor, metadata: SamplingMetadata, output_ids: list[list[int]]) -> torch.Tensor:
        """In place of the function by which vLLM's sampler applies penalties from lists on the host, `output_ids`."""
        self._penalties.apply(logits, self.input_batch.req_ids, metadata)
        return logits

    def feed_further(self, request_ids: Sequence[str], positions: np.ndarray) -> None:
        """Feeds what each request has at `positions` int `[n]`; -1 for one that the step computes to no effect."""
        spans = [TokenSpan(r, int(p) if p >= 0 else NOWHERE, 1) for r, p in zip(request_ids, positions, strict=True)]
        self._feed(spans, is_further=True)

    def _feed(self, spans: Sequence[TokenSpan], *, is_further: bool = False) -> None:
        """What the model is given beside token ids."""
        if self._inputs is not None:
            self._inputs.feed(spans, is_further=is_further)
        if self._residual is not None:
            self._residual.feed(spans)

    def _rows_to_sample(self, tokens: int) -> SampledRows:
        """How the batch is sampled for so many tokens of each request."""
        batch, n = self.input_batch, self.input_batch.num_reqs
        return SampledRows.of(
            (batch.top_k_cpu[:n], batch.top_p_cpu[:n]),
            batch.temperature_cpu[:n] == 0,
            [self._states[request_id].noise for request_id in batch.req_ids],
            self.optimistic_seq_lens_cpu[:n].numpy() - batch.num_prompt_tokens[:n],
            tokens,
            self.device,
        )

    def keep_hidden(self) -> None:
        """For what the model makes after sampling, of the step that was just executed."""
        if self._residual is not None and self.execute_model_state is not None:
            self._hidden = self.execute_model_state.sample_hidden_states

    def take_codes(self) -> RowsOfStep | None:
        """The residual codes of the step that was just sampled from, on the device; None without any."""
        return None if self._residual is None else self._residual.take()

    def take_rows(self) -> RowsOfStep | None:
        """The rows of the step that was just executed, on the device; None when no request of it wants rows."""
        rows, state, kind = self._rows_made(), self.execute_model_state, self.omni_config.rows_kind
        if rows is None or state is None:
            return None
        spans = self._spans(state.scheduler_output)
        emitting = [span for span in spans if self._states[span.request_id].emits(span.start)]
        facts = {span.request_id: self._prompt_facts(span.request_id) for span in emitting}
        masks = {r: mask for r in facts if (mask := self._states[r].mask) is not None}
        if not masks:
            return RowsOfStep.of(kind, rows if self._rows_out is None else rows.clone(), spans, facts)
        part = EmittedPart.of(spans, masks)
        own = rows.index_select(0, on_device(part.places, rows.device))
        return RowsOfStep.of(kind, own, part.spans, facts, part.masks)

    def _rows_made(self) -> torch.Tensor | None:
        """`[n, H]` of all positions of the step, which the next one may write over; None where no rows are wanted."""
        embeddings, self._embeddings = self._embeddings, None
        state = self.execute_model_state
        if state is None:
            return None
        if self._rows_out is not None:
            number = state.scheduler_output.total_num_scheduled_tokens
            return self._rows_out[:number] if self._emits() else None
        return None if embeddings is None else embeddings.add_(state.hidden_states[: embeddings.shape[0]])

    def _text_embeddings(self, num_tokens: int) -> torch.Tensor:
        """Token embeddings of the step, zero at audio, image and video positions; a tensor of its own.

        Taken before the forward pass: on CUDA it uses this input as its residual stream and writes over it.
        """
        embeddings = self.inputs_embeds.gpu[:num_tokens]
        mask = self._multimodal_mask
        if mask is None or not bool(mask.any()):
            return embeddings.clone()
        return embeddings.masked_fill(mask[:num_tokens].to(embeddings.device, non_blocking=True).unsqueeze(-1), 0)

    def _prompt_facts(self, request_id: str) -> PromptFacts:
        """With the rows that are computed first; with a cached prefix they are not those of position zero."""
        state = self._states[request_id]
        if not state.begins:
            return NO_FACTS
        state.begins = False
        request = self.requests[request_id]
        make = getattr(self.get_model(), "row_positions", None)
        if make is not None:
            return PromptFacts(make(request.prompt_token_ids, request.mm_features), state.prefix)
        positions = request.mrope_positions
        of_prompt = None if positions is None else positions[:, : request.num_prompt_tokens].long()
        return PromptFacts(of_prompt, state.prefix)


def _behind_the_largest(positions: torch.Tensor) -> int:
    """How far the position of what follows a prompt is from its number, where positions `[3, P]` are whole numbers."""
    return int(positions.max()) + 1 - positions.shape[1]


def _for_each(tokens: int, logprobs: LogprobsTensors | None) -> LogprobsTensors | None:
    """A row for each of a request's `tokens`, as vLLM reads a step of several; only requests of one token are told."""
    if logprobs is None:
        return None
    rows = (each.repeat_interleave(tokens, dim=0) for each in logprobs[:3])
    return LogprobsTensors(*rows)
