"""A sound stage's worker in a process of its own, as it has on a card."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.vllm_engine.engine_args import OmniEngineArgs
from omni_cluster.vllm_engine.stage_worker import StageWorker


@pytest.fixture(scope="module")
def worker(tiny: Path) -> Iterator[StageWorker]:
    stage = StageConfig(stage_id=0, model_stage="code2wav", num_gpus=0, final_output_type="audio")
    pipeline = PipelineConfig.model_construct(model=str(tiny), family="qwen2_5_omni", stages=[stage])
    args = OmniEngineArgs.for_sound_stage(stage, pipeline, str(tiny))
    args.distributed_executor_backend = "mp"
    made = StageWorker(args)
    yield made
    made.shutdown()


def wait_s(worker: object, seconds: float) -> float:
    """Runs in the worker's process."""
    time.sleep(seconds)
    return seconds


def test_the_caller_sleeps_until_the_answer_is_there(worker: StageWorker) -> None:
    """A reader that turns round uses all of that time."""
    assert worker.call("steps_of_a_job") == [9]
    began_s = time.thread_time()
    assert worker.call(wait_s, 2.0) == [2.0]  # type: ignore[arg-type]
    assert time.thread_time() - began_s < 1.0


def test_an_answer_whose_notice_is_lost_comes_all_the_same(worker: StageWorker) -> None:
    (queue,) = worker._executor.response_mqs  # type: ignore[attr-defined]
    waiting = queue._spin_condition
    waiting.poller._poller.unregister(waiting.local_notify_socket)
    for _ in range(50):
        assert worker.call("steps_of_a_job") == [9]
