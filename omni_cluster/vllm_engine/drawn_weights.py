"""A load format that draws each tensor by its name: for checkpoints of files with names and without values.

The engine's processes import this, which makes the format known to vLLM.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import torch
from torch import nn
from vllm.config import ModelConfig, get_current_vllm_config
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from omni_cluster.memory.sizes import stored_tensors
from omni_cluster.models.checkpoint_maker import STORED_DTYPES, Weight
from omni_cluster.models.registry import family_class
from omni_cluster.vllm_engine.engine_args import OmniModelConfig

_DTYPES = {stored: getattr(torch, name) for name, stored in STORED_DTYPES.items()}


@register_model_loader("drawn")
class DrawnWeights(DefaultModelLoader):
    """vLLM's own loader, of drawn tensors."""

    def download_model(self, model_config: ModelConfig) -> None:
        """There is nothing to have."""

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        family = family_class(OmniModelConfig.of(get_current_vllm_config()).family)
        is_unused = getattr(model, "is_unused_checkpoint_weight", lambda _: False)
        # What vLLM quantizes as it loads is nowhere until then.
        device = next(each.device for each in model.parameters() if not each.is_meta)
        for name, tensor in stored_tensors(Path(model_config.model)):
            if not is_unused(name):
                weight = Weight(name, tuple(tensor["shape"]), _DTYPES[tensor["dtype"]])
                yield name, family.drawn(weight, device)
