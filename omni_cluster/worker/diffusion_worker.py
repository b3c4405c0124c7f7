"""vLLM's worker for this platform around a diffusion model: device, memory and distributed set-up are vLLM's."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np

from omni_cluster.models.family import DiffusionJob, StepTime
from omni_cluster.worker.ar_worker import RUNNER_NAME, PlatformWorker
from omni_cluster.worker.diffusion_model_runner import GPUDiffusionModelRunner


class GPUDiffusionWorker(PlatformWorker):
    """A diffusion stage's worker: no KV cache, no token scheduler; jobs come from `DiffusionEngine`."""

    model_runner: GPUDiffusionModelRunner

    def init_device(self) -> None:
        module, name = RUNNER_NAME
        with patch.object(importlib.import_module(module), name, GPUDiffusionModelRunner):
            super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        self.model_runner.load_model()

    def begin(self, number: int, job: DiffusionJob) -> None:
        self.model_runner.begin(number, job)

    def step(self, numbers: Sequence[int]) -> StepTime | None:
        return self.model_runner.step(numbers)

    def finish(self, numbers: Sequence[int]) -> list[np.ndarray]:
        return self.model_runner.finish(numbers)

    def drop(self, numbers: Sequence[int]) -> None:
        self.model_runner.drop(numbers)

    def forget(self, streams: Sequence[str]) -> None:
        self.model_runner.forget(streams)

    def sample_rate_hz(self) -> int:
        return self.model_runner.model.sample_rate_hz

    def steps_of_a_job(self) -> int:
        return self.model_runner.model.steps
