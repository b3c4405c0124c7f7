"""vLLM's worker for this platform around a sound model: device, memory and distributed set-up are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from omni_cluster.models.sound import SoundJob, StepTime
from omni_cluster.vllm_engine.device import DEVICE
from omni_cluster.vllm_engine.install import replaced
from omni_cluster.vllm_engine.raised import returns_errors
from omni_cluster.vllm_engine.sleeping_condition import sleep_between_calls
from omni_cluster.vllm_engine.worker.ar_worker import RUNNER, PlatformWorker
from omni_cluster.vllm_engine.worker.sound_model_runner import GPUSoundModelRunner


class GPUSoundWorker(PlatformWorker):
    """A sound stage's worker: no KV cache, no token scheduler; jobs come from `SoundEngine`."""

    model_runner: GPUSoundModelRunner

    def init_device(self) -> None:
        if self.parallel_config.distributed_executor_backend == "mp":
            sleep_between_calls()
        with replaced(*RUNNER, GPUSoundModelRunner):
            super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        self.model_runner.load_model()

    @returns_errors
    def begin(self, number: int, job: SoundJob) -> None:
        self.model_runner.begin(number, job)

    @returns_errors
    def step(self, numbers: Sequence[int], ending: Sequence[int]) -> StepTime | None:
        return self.model_runner.step(numbers, ending)

    @returns_errors
    def finish(self, numbers: Sequence[int]) -> list[np.ndarray]:
        return self.model_runner.finish(numbers)

    def drop(self, numbers: Sequence[int]) -> None:
        self.model_runner.drop(numbers)

    def forget(self, streams: Sequence[str]) -> None:
        self.model_runner.forget(streams)

    def ask_device(self) -> None:
        """See `Device.ask`."""
        DEVICE.ask()

    def steps_of_a_job(self) -> int:
        return self.model_runner.model.steps

    def overlaps(self) -> bool:
        return self.model_runner.model.overlaps
