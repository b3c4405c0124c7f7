"""The thinker as a vLLM model: vLLM's own, but for videos and the decoder's steps of one token a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMultiModal
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerForConditionalGeneration
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VisionTransformer
from vllm.model_executor.models.utils import WeightsMapper
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec

from omni_cluster.kernels.decoder_kernels import MAX_REQUESTS
from omni_cluster.kernels.fused_decoder import FusedDecoder
from omni_cluster.models.dropped_warnings import drop_warnings
from omni_cluster.models.kept_tables import KeptTables
from omni_cluster.models.qwen2_5_omni.audio_tower import Hearing
from omni_cluster.models.qwen2_5_omni.memory import KEPT_ANGLES_BYTES
from omni_cluster.models.qwen2_5_omni.thinker_processor import (
    ThinkerDummyInputs,
    ThinkerProcessingInfo,
    ThinkerProcessor,
)
from omni_cluster.models.qwen2_5_omni.video_tokens import Clock, prompt_positions
from omni_cluster.models.thinkers.heard_video_items import SOUND, SOUND_LENGTHS, in_prompt_order
from omni_cluster.models.thinkers.media_places import IS_SOUND, places

ARCHITECTURE = "Qwen2_5OmniThinker"


@MULTIMODAL_REGISTRY.register_processor(ThinkerProcessor, info=ThinkerProcessingInfo, dummy_inputs=ThinkerDummyInputs)
class Qwen2_5OmniThinker(Qwen2_5OmniThinkerForConditionalGeneration):
    """vLLM's thinker; steps that the fused decoder can compute do not go through its compiled layers.

    A video that is heard is one item, whose embeddings are its frames' and its sound's in the order of the prompt.
    """

    # vLLM reads names of LoRA adapters by it too, and one that was trained on the thinker alone has shorter ones.
    hf_to_vllm_mapper = Qwen2_5OmniThinkerForConditionalGeneration.hf_to_vllm_mapper | WeightsMapper(
        orig_to_new_prefix={"model.layers.": "language_model.model.layers."}
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        # Tests compare what it hears with transformers on a CPU, where there is none.
        drop_warnings({Qwen2_5OmniThinkerForConditionalGeneration.__module__: ("flash_attn is not available",)})
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # vLLM leaves out the towers of an engine that is configured for none of their media.
        if isinstance(self.visual, Qwen2_5_VisionTransformer):
            self.visual._rope_by_thw_cache = KeptTables(KEPT_ANGLES_BYTES)
        hears = isinstance(self.audio_tower, Qwen2_5OmniAudioEncoder)
        self._hearing = Hearing(self.audio_tower) if hears else None
        decoder = self.language_model.model
        # Adapters are in the layers that the fused decoder would not go through.
        is_fused = vllm_config.parallel_config.pipeline_parallel_size == 1 and vllm_config.lora_config is None
        self._fused_decoder = FusedDecoder(decoder.layers, decoder.norm) if is_fused else None

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> Any:
        """`positions` `[3, n]`, `inputs_embeds` `[n, hidden_size]` -> hidden states `[n, hidden_size]`."""
        fused = self._fused_decoder
        if fused is not None and inputs_embeds is not None and fused.fits(inputs_embeds):
            return fused(positions, inputs_embeds)
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)

    @property
    def most_fused_requests(self) -> int:
        """Of a step that goes through kernels of this project."""
        return 0 if self._fused_decoder is None else MAX_REQUESTS

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        """Positions int64 `[3, n]` of a prompt, and how far the position of what follows is from its number."""
        media = places(mm_features, self.config.vision_config.spatial_merge_size)
        positions = prompt_positions(len(input_tokens), media, Clock.of(self.config))
        # transformers goes on after the last position here, and after the largest in the talker.
        return torch.from_numpy(positions), int(positions[:, -1].max()) + 1 - len(input_tokens)

    def embed_multimodal(self, **kwargs: Any) -> MultiModalEmbeddings:
        features, lengths, is_sound = (kwargs.pop(name, None) for name in (SOUND, SOUND_LENGTHS, IS_SOUND))
        seen = super().embed_multimodal(**kwargs)
        if features is None:
            return seen
        heard = self._process_audio_input({"input_features": features, "audio_feature_lengths": lengths})
        return in_prompt_order(seen, heard, is_sound)

    def _process_audio_input(self, audio_input: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        if self._hearing is None:
            raise RuntimeError("this engine is configured for no sounds.")
        return self._hearing(audio_input["input_features"], audio_input["audio_feature_lengths"])

    def capture_encoders(self) -> None:
        """Captures what can be captured of them, once the weights are loaded."""
        if self._hearing is not None:
            self._hearing.capture()

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # Past vLLM's own for this model, which takes frames and sound of a video for two items.
        return SupportsMultiModal.embed_input_ids(self, input_ids, multimodal_embeddings, is_multimodal=is_multimodal)


def thinker_config(config: Any) -> Any:
    """`hf_overrides` of the thinker's engine: the checkpoint's configuration, for the class above."""
    config.architectures = [ARCHITECTURE]
    return config


# As a class object: vLLM would inspect a dotted name in a process of its own, which takes seconds.
ModelRegistry.register_model(ARCHITECTURE, Qwen2_5OmniThinker)
