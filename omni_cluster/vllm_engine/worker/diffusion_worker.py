"""vLLM's worker for this platform around a diffusion model: device, memory and distributed set-up are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from omni_cluster.models.family import DiffusionJob
from omni_cluster.vllm_engine.install import replaced
from omni_cluster.vllm_engine.worker.ar_worker import RUNNER, PlatformWorker
from omni_cluster.vllm_engine.worker.diffusion_model_runner import GPUDiffusionModelRunner


class GPUDiffusionWorker(PlatformWorker):
    """A diffusion stage's worker: no KV cache, no token scheduler; batches come from `DiffusionEngine`."""

    model_runner: GPUDiffusionModelRunner

    def init_device(self) -> None:
        with replaced(*RUNNER, GPUDiffusionModelRunner):
            super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        self.model_runner.load_model()

    def generate(self, jobs: Sequence[DiffusionJob]) -> list[np.ndarray]:
        return self.model_runner.generate(jobs)

    def forget(self, streams: Sequence[str]) -> None:
        self.model_runner.forget(streams)

    def sample_rate_hz(self) -> int:
        return self.model_runner.model.sample_rate_hz
