"""The configurations of the made checkpoints: tiny's own sizes, and those of the hub's 3b and 7b."""

# transformers takes seconds to import and a reader of a cached checkpoint needs none of it, so the functions import it.
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omni_cluster.models.qwen2_5_omni.checkpoint_tokens import TokenLayout, token_layout

if TYPE_CHECKING:
    from transformers import Qwen2_5OmniConfig


HUB_CODEC_MARKS = 8292


def build_config(preset: str) -> Qwen2_5OmniConfig:
    dtype = "float32" if preset == "tiny" else "bfloat16"
    return config_of(_SIZES[preset](), token_layout(preset), HUB_CODEC_MARKS, dtype)


def config_of(sizes: Mapping[str, Mapping[str, Any]], tokens: TokenLayout, marks: int, dtype: str) -> Qwen2_5OmniConfig:
    """`sizes`: of thinker, talker and token2wav. `marks`: the talker's first id behind its codes that is a mark."""
    from transformers import Qwen2_5OmniConfig

    return Qwen2_5OmniConfig(
        thinker_config={**sizes["thinker"], **_media_ids(tokens), **text_ends(tokens), "dtype": dtype},
        talker_config={**sizes["talker"], **_media_ids(tokens), **_speech_ids(tokens, marks), "dtype": dtype},
        token2wav_config={**sizes["token2wav"], "dtype": "float32"},
        enable_audio_output=True,
        dtype=dtype,
    )


def _media_ids(tokens: TokenLayout) -> dict[str, int]:
    return {
        "audio_token_index": tokens.id_of("<|AUDIO|>"),
        "image_token_index": tokens.id_of("<|IMAGE|>"),
        "video_token_index": tokens.id_of("<|VIDEO|>"),
        "audio_start_token_id": tokens.id_of("<|audio_bos|>"),
        "audio_end_token_id": tokens.id_of("<|audio_eos|>"),
        "vision_start_token_id": tokens.id_of("<|vision_bos|>"),
        "vision_end_token_id": tokens.id_of("<|vision_eos|>"),
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
    }


def text_ends(tokens: TokenLayout) -> dict[str, int]:
    return {
        "bos_token_id": tokens.id_of("<|im_start|>"),
        "eos_token_id": tokens.id_of("<|im_end|>"),
        "pad_token_id": tokens.id_of("<|endoftext|>"),
    }


def _speech_ids(tokens: TokenLayout, marks: int) -> dict[str, int]:
    return {
        "tts_text_pad_token_id": tokens.tts_text_pad,
        "tts_text_start_token_id": tokens.tts_text_start,
        "tts_text_end_token_id": tokens.tts_text_end,
        "tts_codec_pad_token_id": marks,
        "tts_codec_start_token_id": marks + 1,
        "tts_codec_end_token_id": marks + 2,
        "tts_codec_mask_token_id": marks + 4,
    }


def mrope(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": list(sections)}


def _tiny_sizes() -> dict[str, dict[str, Any]]:
    hidden = 128
    thinker = {
        "user_token_id": 1,
        "text_config": {
            "vocab_size": 512, "hidden_size": hidden, "intermediate_size": 256, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
            "rope_parameters": mrope(4, 6, 6), "tie_word_embeddings": False,
        },
        "audio_config": {
            "num_mel_bins": 128, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128,
            "d_model": 64, "max_source_positions": 1500, "n_window": 100, "output_dim": hidden,
        },
        "vision_config": {
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": 14,
            "window_size": 112, "out_hidden_size": hidden, "fullatt_block_indexes": [1], "tokens_per_second": 25,
        },
    }  # fmt: skip
    # heads * head_dim differs from hidden_size, as in the 7B talker.
    talker = {
        "vocab_size": 8448, "embedding_size": hidden, "hidden_size": 64, "head_dim": 32, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "rope_parameters": mrope(4, 6, 6),
    }  # fmt: skip
    dit = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32, "emb_dim": 32,
        "look_ahead_layers": [0], "look_backward_layers": [1], "enc_dim": 16, "enc_channels": [16, 16, 16, 16, 48],
        "enc_attention_channels": 16, "enc_res2net_scale": 2, "enc_se_channels": 16,
    }  # fmt: skip
    token2wav = {"dit_config": dit, "bigvgan_config": {"upsample_initial_channel": 64}}
    return {"thinker": thinker, "talker": talker, "token2wav": token2wav}


def _7b_sizes() -> dict[str, dict[str, Any]]:
    text = {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "rope_parameters": mrope(16, 24, 24),
    }  # fmt: skip
    talker = {
        "embedding_size": 3584, "intermediate_size": 18944, "num_attention_heads": 12, "num_key_value_heads": 4,
        "head_dim": 128, "rope_parameters": mrope(16, 24, 24),
    }  # fmt: skip
    return _hub_sizes(text, talker)


def _3b_sizes() -> dict[str, dict[str, Any]]:
    text = {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "rope_parameters": mrope(16, 24, 24),
    }  # fmt: skip
    talker = {
        "embedding_size": 2048, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
        "head_dim": 64, "rope_parameters": mrope(16, 16, 0),
    }  # fmt: skip
    return _hub_sizes(text, talker)


def _hub_sizes(text: dict[str, Any], talker: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What 3b and 7b share; transformers' defaults are the hub's for the audio encoder, the DiT and BigVGAN."""
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "window_size": 112,
        "out_hidden_size": text["hidden_size"], "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 25,
    }  # fmt: skip
    thinker = {
        "user_token_id": 872,
        "text_config": {**text, "max_position_embeddings": 32768, "tie_word_embeddings": False},
        "audio_config": {"output_dim": text["hidden_size"]},
        "vision_config": vision,
    }
    shared = {"vocab_size": 8448, "hidden_size": 896, "num_hidden_layers": 24, "max_position_embeddings": 32768}
    return {"thinker": thinker, "talker": {**shared, **talker}, "token2wav": {}}


_SIZES = {"tiny": _tiny_sizes, "3b": _3b_sizes, "7b": _7b_sizes}
PRESETS = tuple(_SIZES)
