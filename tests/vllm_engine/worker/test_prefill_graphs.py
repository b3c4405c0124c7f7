from __future__ import annotations

import pytest
from vllm.config import CUDAGraphMode, SchedulerConfig, VllmConfig
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from omni_cluster.vllm_engine.worker.prefill_graphs import CAPTURE_SIZES, PrefillGraphs

MAX_NUM_SEQS = 64
GROUP = 3


def planned(mode: CUDAGraphMode) -> tuple[CudagraphDispatcher, PrefillGraphs]:
    """A dispatcher as vLLM's runner has it once its attention is known, with prefill graphs."""
    scheduling = SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_model_len=4096, is_encoder_decoder=False)
    config = VllmConfig(scheduler_config=scheduling)
    config.compilation_config.cudagraph_capture_sizes = CAPTURE_SIZES
    config.compilation_config.max_cudagraph_capture_size = CAPTURE_SIZES[-1]
    dispatcher, graphs = CudagraphDispatcher(config), PrefillGraphs(GROUP)
    dispatcher.initialize_cudagraph_keys(mode)
    graphs.plan(dispatcher, CAPTURE_SIZES)
    return dispatcher, graphs


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_prompts_and_single_tokens_have_whole_graphs_of_their_own(mode: CUDAGraphMode) -> None:
    dispatcher, _ = planned(mode)
    for tokens, padded in ((106, 112), (300, 320), (1024, 1024)):
        runs, step = dispatcher.dispatch(tokens, uniform_decode=False)
        assert (runs, step.num_tokens, step.num_reqs, step.uniform) == (CUDAGraphMode.FULL, padded, MAX_NUM_SEQS, False)
    runs, step = dispatcher.dispatch(30, uniform_decode=True)
    assert (runs, step.num_tokens, step.uniform) == (CUDAGraphMode.FULL, 32, True)
    assert dispatcher.dispatch(1025, uniform_decode=False)[0] == CUDAGraphMode.NONE
    captured = dict(dispatcher.get_capture_descs())
    assert list(captured) == [CUDAGraphMode.FULL]
    assert len(captured[CUDAGraphMode.FULL]) == len(set(captured[CUDAGraphMode.FULL]))


def test_a_device_without_whole_graphs_keeps_what_it_has() -> None:
    dispatcher, graphs = planned(CUDAGraphMode.NONE)
    assert dispatcher.get_capture_descs() == []
    assert graphs.planned_tokens(2) == 2


def test_short_steps_are_planned_with_the_tiles_of_long_ones() -> None:
    dispatcher, graphs = planned(CUDAGraphMode.FULL_DECODE_ONLY)
    assert graphs.least_tokens * GROUP > 64 >= (graphs.least_tokens - 1) * GROUP
    assert [graphs.planned_tokens(tokens) for tokens in (1, 2, graphs.least_tokens, graphs.least_tokens + 1)] == [
        1,
        graphs.least_tokens,
        graphs.least_tokens,
        graphs.least_tokens + 1,
    ]
    for tokens, padded in ((2, 2), (3, 4), (5, 8)):
        runs, step = dispatcher.dispatch(tokens, uniform_decode=False)
        assert (runs, step.num_tokens, step.uniform) == (CUDAGraphMode.FULL, padded, False)
