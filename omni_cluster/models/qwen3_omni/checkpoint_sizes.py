"""Sizes of the made checkpoints, by the names of the configuration's keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SILENCED = 1_024
"""transformers never samples the last so many ids of the talker, but for the end: all that are no codes."""


@dataclass(frozen=True)
class Sizes:
    """`codes`: values of a codebook, of which there are `codebooks`: with two the predictor would have no step that
    begins with a code of its own. `accepted_layer`: whose input the talker takes of media.
    """

    dtype: str
    codes: int
    codebooks: int
    accepted_layer: int
    mrope_section: list[int]
    text: dict[str, Any]
    audio: dict[str, Any]
    vision: dict[str, Any]
    talker: dict[str, Any]
    predictor: dict[str, Any]
    code2wav: dict[str, Any]


_TINY = Sizes(
    dtype="float32",
    codes=256,
    codebooks=4,
    accepted_layer=4,
    mrope_section=[8, 4, 4],
    text={
        "vocab_size": 448, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
        "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
    },
    audio={
        "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128, "d_model": 64,
        "downsample_hidden_size": 16, "output_dim": 64,
    },
    vision={
        "depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64,
        "num_position_embeddings": 64, "image_size": 128, "deepstack_visual_indexes": [0, 1, 2],
    },
    talker={
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "moe_intermediate_size": 16,
        "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32,
    },
    predictor={
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
    },
    code2wav={
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 64, "sliding_window": 8, "decoder_dim": 32,
    },
)  # fmt: skip

_LARGE = Sizes(
    dtype="bfloat16",
    codes=2_048,
    codebooks=16,
    accepted_layer=24,
    mrope_section=[24, 20, 20],
    text={
        "vocab_size": 152_064, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 65_536,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    },
    audio={
        "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "d_model": 1280,
        "downsample_hidden_size": 480, "output_dim": 2048,
    },
    vision={
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 2048,
        "num_position_embeddings": 2304, "image_size": 768, "deepstack_visual_indexes": [8, 16, 24],
    },
    talker={
        "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 65_536, "moe_intermediate_size": 384,
        "num_experts": 128, "num_experts_per_tok": 6, "shared_expert_intermediate_size": 768,
    },
    predictor={
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 5, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 65_536,
    },
    code2wav={
        "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16,
        "head_dim": 64, "intermediate_size": 3072, "sliding_window": 72, "decoder_dim": 1536,
    },
)  # fmt: skip

SIZES = {"tiny": _TINY, "30b": _LARGE}
"""By preset; "30b" as the hub's Qwen3-Omni-30B-A3B."""
