"""The thinker as a vLLM model: vLLM's own, but for the decoder's steps of one token a request."""

from __future__ import annotations

from typing import Any

import torch
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerForConditionalGeneration

from omni_cluster.models.qwen2_5_omni.fused_decoder import FusedDecoder

ARCHITECTURE = "Qwen2_5OmniThinker"


class Qwen2_5OmniThinker(Qwen2_5OmniThinkerForConditionalGeneration):
    """vLLM's thinker; steps that the fused decoder can compute do not go through its compiled layers."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        decoder = self.language_model.model
        self._fused_decoder = FusedDecoder(decoder.layers, decoder.norm)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> Any:
        """`positions` `[3, n]`, `inputs_embeds` `[n, hidden_size]` -> hidden states `[n, hidden_size]`."""
        if inputs_embeds is not None and intermediate_tensors is None and self._fused_decoder.fits(inputs_embeds):
            return self._fused_decoder(positions, inputs_embeds)
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)


def thinker_config(config: Any) -> Any:
    """`hf_overrides` of the thinker's engine: the checkpoint's configuration, for the class above."""
    config.architectures = [ARCHITECTURE]
    return config


# As a class object: vLLM would inspect a dotted name in a process of its own, which takes seconds.
ModelRegistry.register_model(ARCHITECTURE, Qwen2_5OmniThinker)
