"""The thinker's stage: media and text in, text out; rows of the media for the talker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

from omni_cluster.config.schema import StageConfig
from omni_cluster.config.traits import EngineTraits
from omni_cluster.memory.sizes import ARSizes, TowerSizes, WeightGroup
from omni_cluster.models.checkpoint_files import max_image_pixels
from omni_cluster.models.family import ARSession, Hold
from omni_cluster.models.qwen3_omni.relied_on import SIGNATURES, THINKER
from omni_cluster.models.stage_spec import ARSpec
from omni_cluster.models.thinker_session import ThinkerSession
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk

ROWS = "accepted layer"
"""What the talker takes of the media in a prompt: what enters the layer that the checkpoint's configuration names."""
AUDIO_ITEM_TOKENS = 390
"""vLLM's largest audio: 30 s."""
MAX_IMAGE_PIXELS = 12_845_056
"""The hub's processor, for a checkpoint that does not say."""


class OfCheckpoint(Protocol):
    """What the stage asks of its family."""

    folder: Path

    def tokenize(self, text: str, has_marks: bool) -> list[int]:
        """Of a text, and whether marks such as <|im_end|> in it are the model's and not text."""


class Thinker(ARSpec):
    """A request without media makes no rows, and finds its prefix in the cache: its talker goes by token ids."""

    name = "thinker"
    emits = frozenset({"text", "rows"})
    rows_kind = ROWS
    rows_at = "media"
    has_rows_out = True
    # Trained on the whole model, or on the thinker alone. Not of the experts: vLLM has no kernels for these on a CPU,
    # and would compute all experts by others on a card.
    lora_prefixes = dict.fromkeys(
        ("thinker.model.layers.*.self_attn.", "model.layers.*.self_attn."), "thinker.model.layers.*.self_attn."
    )

    def __init__(self, family: OfCheckpoint) -> None:
        self._family = family

    @property
    def traits(self) -> EngineTraits:
        from omni_cluster.models.qwen3_omni.thinker_model import thinker_config

        return EngineTraits(
            thinker_config, is_host_bound=True, relied_on=THINKER, signatures=SIGNATURES, tool_parser="hermes"
        )

    def sizes(self, config: StageConfig) -> ARSizes:
        return thinker_sizes(self._family.folder)

    def session(self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None, hold: Hold) -> ARSession:
        return ThinkerSession(request, self._family.tokenize, only_of_media=True)


def thinker_sizes(folder: Path) -> ARSizes:
    thinker = _config(folder).thinker_config
    text = thinker.text_config
    return ARSizes(
        weights=(WeightGroup("thinker."),),
        num_layers=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        hidden_size=text.hidden_size,
        intermediate_size=text.num_experts_per_tok * text.moe_intermediate_size,
        vocab_size=text.vocab_size,
        max_positions=text.max_position_embeddings,
        # What is added to the first layers, and float32 angles. Rows out are counted as those of any stage.
        buffers_size=text.hidden_size * len(thinker.vision_config.deepstack_visual_indexes) + 2 * text.head_dim,
        towers=(_eye(folder, thinker.vision_config), _ear(thinker.audio_config)),
    )


def _config(folder: Path) -> Any:
    """Read by transformers, which knows the defaults of what a checkpoint leaves out."""
    from transformers import Qwen3OmniMoeConfig

    return Qwen3OmniMoeConfig.from_pretrained(folder)


def _eye(folder: Path, vision: Any) -> TowerSizes:
    """Beside a token's embedding come out what is added to the first layers."""
    merged = vision.spatial_merge_size**2
    return TowerSizes(
        modalities=("image", "video"),
        max_tokens=max_image_pixels(folder, MAX_IMAGE_PIXELS) // (vision.patch_size**2 * merged),
        positions_per_token=merged,
        input_size=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        output_size=vision.out_hidden_size * (1 + len(vision.deepstack_visual_indexes)),
    )


def _ear(audio: Any) -> TowerSizes:
    """Eight mel frames a token, which are one position of the layers."""
    return TowerSizes(
        modalities=("audio",),
        max_tokens=AUDIO_ITEM_TOKENS,
        positions_per_token=1,
        input_size=8 * audio.num_mel_bins,
        hidden_size=audio.d_model,
        intermediate_size=audio.encoder_ffn_dim,
        output_size=audio.output_dim,
    )
