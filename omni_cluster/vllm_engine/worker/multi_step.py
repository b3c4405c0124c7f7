"""Multi-step decoding: more than one token of a request in one step of its engine.

An engine's work on the host around a step takes longer than a small model on its device. So a step goes on if it can:
the sampled tokens are the next inputs, on the device, and the host sees them when all of them are there. Each
further step is an ordinary decoding step of the whole batch: the same graph, the same sampling.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context

NO_TOKEN = -1
"""vLLM's mark for a place among the sampled tokens that holds none."""
UNUSED_SLOT = 0
"""A place in vLLM's null block, which belongs to no request."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What each further step feeds, `[steps, n]` for `n` requests in the batch's order, on the device.

    Requests that are not `active` in a step are computed with the others, to no effect: they read one place and write
    to the null block. `positions` are the rotary embedding's; `lengths` the sequences', the new token included.
    """

    positions: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    active: torch.Tensor


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How vLLM runs the batch: `attended` rows have attention metadata, padding of a whole graph included."""

    num_requests: int
    attended: int
    mode: CUDAGraphMode
    batch: BatchDescriptor
    across_dp: torch.Tensor | None
    slots_by_group: dict[int, torch.Tensor]
    slots_by_layer: dict[str, torch.Tensor]


class MultiStepDecoder:
    """Goes on decoding after a step of `runner`, an `OmniGPUModelRunner`."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        starts = torch.arange(runner.max_num_reqs + 1, dtype=torch.int32)
        self._starts = copy.copy(runner.query_start_loc)
        self._starts.cpu, self._starts.np = starts, starts.numpy()
        self._starts_on_device = starts.to(runner.device)

    def run(self, sampled: torch.Tensor, further: Mapping[str, int]) -> torch.Tensor:
        """Decodes `further[request]` tokens more after `sampled`, int32 `[n, 1]`.

        Returns int32 `[n, 1 + max(further)]` with `NO_TOKEN` behind each request's last.
        """
        runner = self._runner
        request_ids = list(runner.input_batch.req_ids)
        counts = np.array([further.get(r, 0) for r in request_ids])
        next_positions = runner.optimistic_seq_lens_cpu[: len(request_ids)].numpy().copy()
        inputs = self._inputs(request_ids, next_positions, counts)
        columns = [sampled]
        with self._one_token_each(len(request_ids), int((next_positions + counts).max())):
            shape = self._shape(len(request_ids))
            for step in range(int(counts.max())):
                active = counts > step
                runner.feed_further(request_ids, np.where(active, next_positions + step, -1))
                hidden = self._hidden(columns[-1], inputs, step, shape)
                logits, inactive = runner.model.compute_logits(hidden), ~inputs.active[step]
                columns.append(runner.sample_step(logits, hidden, inactive, ahead=step + 1).sampled_token_ids)
        further_tokens = torch.cat(columns[1:], dim=1).masked_fill_(~inputs.active.t(), NO_TOKEN)
        return torch.cat([sampled, further_tokens], dim=1)

    def _inputs(self, request_ids: Sequence[str], next_positions: np.ndarray, counts: np.ndarray) -> StepInputs:
        runner = self._runner
        steps = np.arange(counts.max())[:, None]
        active = steps < counts
        indices = np.where(active, next_positions + steps, 0)
        shifts = [runner.requests[r].mrope_position_delta or 0 for r in request_ids] if runner.uses_mrope else 0
        host = torch.from_numpy(np.stack([indices, indices + shifts, active]).astype(np.int64))
        host = host.pin_memory() if runner.device.type == "cuda" else host
        indices_, positions, active_ = host.to(runner.device, non_blocking=True)
        return StepInputs(positions, (indices_ + 1).int(), self._slots(indices_, active_.bool()), active_.bool())

    def _slots(self, indices: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Places in the KV cache of the tokens at `indices` `[steps, n]`."""
        table = self._runner.input_batch.block_table[0]
        blocks = table.get_device_tensor(indices.shape[1]).gather(1, (indices // table.block_size).t()).t()
        return (blocks.long() * table.block_size + indices % table.block_size).masked_fill_(~active, UNUSED_SLOT)

    @contextmanager
    def _one_token_each(self, num_requests: int, longest: int) -> Iterator[None]:
        """While it lasts, the runner's buffers say that each request has one token in the step.

        The host's part is a tensor of its own: the runner's may still be on its way to the device.
        """
        runner, stock = self._runner, self._runner.query_start_loc
        stock.gpu[: num_requests + 1] = self._starts_on_device[: num_requests + 1]
        stock.gpu[num_requests + 1 :] = num_requests
        self._starts.gpu, runner.query_start_loc = stock.gpu, self._starts
        runner.optimistic_seq_lens_cpu[:num_requests] = longest
        try:
            yield
        finally:
            runner.query_start_loc = stock

    def _shape(self, num_requests: int) -> BatchShape:
        """How vLLM runs a decoding step of so many requests: by which graph, filled up to which size."""
        runner = self._runner
        mode, batch, _, across_dp, _ = runner._determine_batch_execution_and_padding(
            num_tokens=num_requests,
            num_reqs=num_requests,
            num_scheduled_tokens_np=np.ones(num_requests, dtype=np.int32),
            max_num_scheduled_tokens=1,
        )
        attended = batch.num_tokens if mode == CUDAGraphMode.FULL else num_requests
        by_group, by_layer = runner._get_slot_mappings(batch.num_tokens, attended, num_requests)
        return BatchShape(num_requests, attended, mode, batch, across_dp, by_group, by_layer)

    def _hidden(self, tokens: torch.Tensor, inputs: StepInputs, step: int, shape: BatchShape) -> torch.Tensor:
        """What each request's next token is sampled from."""
        runner, n = self._runner, shape.num_requests
        runner.input_ids.gpu[:n].copy_(tokens[:, 0])
        self._positions[..., :n] = inputs.positions[step]
        runner.seq_lens[:n] = inputs.lengths[step]
        runner.input_batch.block_table[0].slot_mapping.gpu[:n] = inputs.slots[step]
        return self._forward(shape)[:n]

    @property
    def _positions(self) -> torch.Tensor:
        runner = self._runner
        return runner.mrope_positions.gpu if runner.uses_mrope else runner.positions  # type: ignore[no-any-return]

    def _forward(self, shape: BatchShape) -> torch.Tensor:
        """One decoding step of the batch as `GPUModelRunner.execute_model` runs it."""
        runner, padded = self._runner, shape.batch.num_tokens
        attention, _ = runner._build_attention_metadata(
            num_tokens=shape.num_requests,
            num_reqs=shape.num_requests,
            max_query_len=1,
            num_tokens_padded=shape.attended,
            num_reqs_padded=shape.attended,
            slot_mappings=shape.slots_by_group,
        )
        with set_forward_context(
            attention,
            runner.vllm_config,
            num_tokens=padded,
            num_tokens_across_dp=shape.across_dp,
            cudagraph_runtime_mode=shape.mode,
            batch_descriptor=shape.batch,
            slot_mapping=shape.slots_by_layer,
        ):
            return runner._model_forward(  # type: ignore[no-any-return]
                input_ids=runner.input_ids.gpu[:padded],
                positions=self._positions[..., :padded],
                **runner._init_model_kwargs(),
            )
