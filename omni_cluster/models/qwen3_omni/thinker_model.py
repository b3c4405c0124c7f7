"""The thinker as a vLLM model: vLLM's own, but for videos, positions, and the rows that the talker takes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import pad
from vllm import ModelRegistry
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMultiModal
from vllm.model_executor.models.qwen3_omni_moe_thinker import Qwen3OmniMoeThinkerForConditionalGeneration
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec

from omni_cluster.models.qwen3_omni.fine_positions import packed, packed_delta
from omni_cluster.models.qwen3_omni.rotation import Rotary, StepRotation
from omni_cluster.models.qwen3_omni.talker_ids import TalkerIds
from omni_cluster.models.qwen3_omni.thinker_processor import (
    ThinkerDummyInputs,
    ThinkerProcessingInfo,
    ThinkerProcessor,
)
from omni_cluster.models.qwen3_omni.user_positions import user_positions
from omni_cluster.models.qwen3_omni.video_tokens import prompt_positions
from omni_cluster.models.thinkers.heard_video_items import SOUND, SOUND_LENGTHS, in_prompt_order
from omni_cluster.models.thinkers.media_places import IS_SOUND, places
from omni_cluster.types.errors import ConfigError

ARCHITECTURE = "Qwen3OmniThinker"


@MULTIMODAL_REGISTRY.register_processor(ThinkerProcessor, info=ThinkerProcessingInfo, dummy_inputs=ThinkerDummyInputs)
class Qwen3OmniThinker(Qwen3OmniMoeThinkerForConditionalGeneration):
    """vLLM's thinker, which writes what enters a layer in its midst to `rows_out`.

    A video that is heard is one item, whose embeddings are its frames' and its sound's in the order of the prompt.
    """

    rows_out: torch.Tensor
    """`[max_num_batched_tokens, hidden_size]`; as `rows_at` of the stage says, only those of media leave the device."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        with plain_experts(vllm_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        text, most_tokens = self.config.text_config, vllm_config.scheduler_config.max_num_batched_tokens
        decoder = self.language_model.model
        whole_config = vllm_config.model_config.hf_config
        decoder._set_aux_hidden_state_layers((accepted_layer(whole_config),))
        self._text_ids = TalkerIds.from_config(whole_config.to_dict()).text
        self.register_buffer("rows_out", torch.zeros(most_tokens, text.hidden_size), persistent=False)
        self._rotation = StepRotation(text, most_tokens)
        for layer in decoder.layers:
            layer.self_attn.rotary_emb = Rotary(text.head_dim)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Packed `positions` `[3, n]`, `inputs_embeds` `[n, hidden_size]` -> hidden states `[n, hidden_size]`."""
        angles = self._rotation(positions)
        hidden, (rows,) = super().forward(input_ids, angles, intermediate_tensors, inputs_embeds, **kwargs)
        self.rows_out[: len(rows)].copy_(rows)
        return hidden

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, Any]:
        """Packed positions `[3, n]` of a prompt, and how far the position of what follows is from its number."""
        media = places(mm_features, self.config.vision_config.spatial_merge_size)
        positions = prompt_positions(len(input_tokens), media, self.config.position_id_per_seconds)
        return torch.from_numpy(packed(positions)), packed_delta(positions)

    def row_positions(self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]) -> torch.Tensor:
        """What goes with the rows: the talker's positions, packed."""
        media = places(mm_features, self.config.vision_config.spatial_merge_size)
        own = user_positions(input_tokens, media, self._text_ids, self.config.position_id_per_seconds)
        return torch.from_numpy(packed(own))

    def embed_multimodal(self, **kwargs: Any) -> MultiModalEmbeddings:
        features, lengths, is_sound = (kwargs.pop(name, None) for name in (SOUND, SOUND_LENGTHS, IS_SOUND))
        seen = super().embed_multimodal(**kwargs)
        if features is None:
            return seen
        heard = self._process_audio_input({"input_features": features, "audio_feature_lengths": lengths})
        # Sound adds nothing to the layers that frames are added to.
        return in_prompt_order(seen, [pad(each, (0, self.multiscale_dim)) for each in heard], is_sound)

    def _process_audio_input(self, audio_input: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Embeddings `[tokens, H]` of each sound, which do not depend on the others.

        The tower fills the last chunk of a sound up to the longest that it is given, and what it fills in is heard: so
        a sound shorter than a chunk goes alone, as in transformers by itself.
        """
        lengths = audio_input["audio_feature_lengths"].flatten()
        sounds = audio_input["input_features"].split(lengths.tolist(), dim=1)
        made: dict[int, torch.Tensor] = {}
        for numbers in self._heard_together(lengths.tolist()):
            together = {
                "input_features": torch.cat([sounds[number] for number in numbers], dim=1),
                "audio_feature_lengths": lengths[numbers],
            }
            made.update(zip(numbers, super()._process_audio_input(together), strict=True))
        return tuple(made[number] for number in range(len(sounds)))

    def _heard_together(self, lengths: Sequence[int]) -> list[list[int]]:
        """Numbers of the sounds that go through the tower at once: all of a chunk and more, and each shorter one."""
        chunk = 2 * self.config.audio_config.n_window
        longer = [number for number, length in enumerate(lengths) if length >= chunk]
        shorter = [[number] for number, length in enumerate(lengths) if length < chunk]
        return [longer, *shorter] if longer else shorter

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # Past vLLM's own for this model, which takes frames and sound of a video for two items.
        media, width = multimodal_embeddings or (), self.config.text_config.hidden_size
        # Here, because the graph of a step runs nothing that would clear what the step before had.
        self._clear_deepstack_input_embeds(len(self.rows_out))
        if is_multimodal is not None and any(each.shape[-1] > width for each in media):
            self._set_deepstack_input_embeds(self._deepstack(media, is_multimodal))
        main = [each[:, :width] for each in media]
        return SupportsMultiModal.embed_input_ids(self, input_ids, main, is_multimodal=is_multimodal)

    def _deepstack(self, media: Sequence[torch.Tensor], is_multimodal: torch.Tensor) -> torch.Tensor:
        """`[levels, n, hidden_size]`: what is added to the first layers' outputs, nothing but where frames are."""
        width = self.config.text_config.hidden_size
        whole = torch.cat([pad(each, (0, width + self.multiscale_dim - each.shape[-1])) for each in media])
        deep = whole.new_zeros(len(is_multimodal), self.multiscale_dim)
        deep[is_multimodal.to(deep.device, non_blocking=True)] = whole[:, width:]
        return deep.unflatten(1, (self.deepstack_num_level, width)).transpose(0, 1)


@contextmanager
def plain_experts(vllm_config: VllmConfig) -> Iterator[None]:
    """Has vLLM choose the kernels of experts as without adapters, which change none of them here.

    It would take those for adapters of experts, and a CPU has none.
    """
    plain = copy.copy(vllm_config)
    plain.lora_config = None
    with set_current_vllm_config(plain):
        yield


def accepted_layer(config: Any) -> int:
    """The layer whose input the talker takes. ConfigError for one that frames are still added to, or that is none.

    transformers' states of the last layer are normalised, and it and vLLM add frames at other moments.
    """
    thinker, layer = config.thinker_config, config.talker_config.accept_hidden_layer
    first = len(thinker.vision_config.deepstack_visual_indexes) + 1
    last = thinker.text_config.num_hidden_layers - 1
    if not first <= layer <= last:
        raise ConfigError(f"accept_hidden_layer is {layer}, but a layer of {first} to {last} can be taken.")
    return int(layer)


def thinker_config(config: Any) -> Any:
    """`hf_overrides` of the thinker's engine: the checkpoint's configuration, for the class above."""
    config.architectures = [ARCHITECTURE]
    return config


# As a class object: vLLM would inspect a dotted name in a process of its own, which takes seconds.
ModelRegistry.register_model(ARCHITECTURE, Qwen3OmniThinker)
