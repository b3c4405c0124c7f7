"""The runner of a sound stage: a family's model, fed with jobs step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from vllm.config import VllmConfig

from omni_cluster.models.registry import family_class
from omni_cluster.models.sound import SoundJob, SoundModel, StepTime
from omni_cluster.models.stage_spec import SoundSpec
from omni_cluster.vllm_engine.engine_args import OmniModelConfig


class GPUSoundModelRunner:
    """Loads a sound stage's model on the worker's device and runs it; see `SoundModel`."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.device = device
        self._omni_config = OmniModelConfig.of(vllm_config)
        self._model: SoundModel | None = None

    @property
    def model(self) -> SoundModel:
        if self._model is None:
            raise RuntimeError(f"stage {self._omni_config.model_stage} has no model; call load_model first.")
        return self._model

    def load_model(self) -> None:
        config = self._omni_config
        family = family_class(config.family)(Path(self.vllm_config.model_config.model))
        spec = cast(SoundSpec, family.specs[config.model_stage])
        options = spec.Options.model_validate(config.options)
        self._model = spec.model(self.device, options, config.shares_card)

    def begin(self, number: int, job: SoundJob) -> None:
        self.model.begin(number, job)

    def step(self, numbers: Sequence[int], ending: Sequence[int]) -> StepTime | None:
        return self.model.step(numbers, ending)

    def finish(self, numbers: Sequence[int]) -> list[np.ndarray]:
        return self.model.finish(numbers)

    def drop(self, numbers: Sequence[int]) -> None:
        self.model.drop(numbers)

    def forget(self, streams: Sequence[str]) -> None:
        """Frees what the model keeps of streams that have ended."""
        self.model.forget(streams)

    def shutdown(self) -> None:
        """Called by vLLM's worker; the model's memory is free once nothing refers to it."""
        self._model = None
