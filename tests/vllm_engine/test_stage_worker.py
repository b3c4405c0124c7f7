"""A sound stage's worker in a process of its own, as it has on a card."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from vllm.distributed.device_communicators.shm_broadcast import SHM_READER_RECHECK_INTERVAL_MS

from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.models.sound import SoundJob
from omni_cluster.types.errors import PayloadError
from omni_cluster.vllm_engine import sleeping_condition
from omni_cluster.vllm_engine.engine_args import OmniEngineArgs
from omni_cluster.vllm_engine.sleeping_condition import SleepingCondition
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


def used_s(worker: object) -> float:
    """Runs in the worker's process: what its thread used of a core until now."""
    return time.thread_time()


def test_the_worker_sleeps_until_it_is_called(worker: StageWorker) -> None:
    (before_s,) = worker.call(used_s)  # type: ignore[arg-type]
    time.sleep(0.9)  # the time for which a reader of vLLM's turns round is 1 s
    (after_s,) = worker.call(used_s)  # type: ignore[arg-type]
    assert after_s - before_s < 0.45


def test_an_error_of_the_model_comes_as_what_it_is(worker: StageWorker) -> None:
    """vLLM passes on its text alone, and the worker goes on."""
    job = SoundJob(np.zeros((5, 1), np.int64), range(0), size=10, voice="Unknown", seed=1)
    with pytest.raises(PayloadError, match=r"^A job has the voice 'Unknown'; voices are .+\.$"):
        worker.call("begin", 0, job)
    worker.call("begin", 1, replace(job, voice="Chelsie"))
    worker.call("drop", [1])


def lose_notices(worker: object = None) -> int:
    """Has the readers of this process hear of no message, and look for one as long as they wait; how many there are."""
    sleeping_condition.LOOKING_S = math.inf  # type: ignore[misc]
    waiting = [each for each in gc.get_objects() if type(each) is SleepingCondition and each.is_reader]
    for each in waiting:
        each.poller.unregister(each.local_notify_socket)
    return len(waiting)


def test_calls_and_answers_whose_notices_are_lost_come_all_the_same(
    worker: StageWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look for them all the time: where each waits until the other has ceased to look, fifty calls take 300 s."""
    monkeypatch.setattr(sleeping_condition, "LOOKING_S", sleeping_condition.LOOKING_S)  # put back at the end
    assert (worker.call(lose_notices), lose_notices()) == ([1], 1)  # type: ignore[arg-type]
    began_s = time.monotonic()
    for _ in range(50):
        assert worker.call("steps_of_a_job") == [9]
    assert time.monotonic() - began_s < 50 * SHM_READER_RECHECK_INTERVAL_MS / 1000
