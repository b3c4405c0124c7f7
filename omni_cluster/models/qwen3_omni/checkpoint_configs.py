"""The configuration of the made checkpoint.

The defaults of transformers' classes are another model's, and some keys that its modules read have none: what is read
stands here.
"""

# transformers takes seconds to import and a reader of a cached checkpoint needs none of it, so the functions import it.
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_cluster.models.qwen3_omni.checkpoint_tokens import VOCAB_SIZE, id_of

if TYPE_CHECKING:
    from transformers import Qwen3OmniMoeConfig

CODES = 256
"""Values of a codebook."""
CODEBOOKS = 4
"""With two the predictor would have no step that begins with a code of its own."""
SILENCED = 1_024
"""transformers never samples the last so many ids of the talker, but for the end: all that are no codes."""
ACCEPTED_LAYER = 4

_HIDDEN, _TALKER_HIDDEN = 64, 32
# In the hub's distance from the codes: pad, bos, eos, what is not thought, and the voices.
_SPECIAL = {"pad": CODES + 100, "bos": CODES + 101, "eos": CODES + 102}
_NOT_THOUGHT = {"nothink": CODES + 107, "think_bos": CODES + 108, "think_eos": CODES + 109}
SPEAKERS = {"chelsie": CODES + 253, "ethan": CODES + 254, "aiden": CODES + 255}


def build_config() -> Qwen3OmniMoeConfig:
    from transformers import Qwen3OmniMoeConfig

    return Qwen3OmniMoeConfig(
        thinker_config={**_thinker(), **_media(), "dtype": "float32"},
        talker_config={**_talker(), **_media(), "dtype": "float32"},
        code2wav_config={**_code2wav(), "dtype": "float32"},
        enable_audio_output=True,
        im_start_token_id=id_of("<|im_start|>"),
        im_end_token_id=id_of("<|im_end|>"),
        tts_pad_token_id=id_of("<tts_pad>"),
        tts_bos_token_id=id_of("<tts_text_bos>"),
        tts_eos_token_id=id_of("<tts_text_eod>"),
        system_token_id=id_of("system"),
        user_token_id=id_of("user"),
        assistant_token_id=id_of("assistant"),
        dtype="float32",
    )


def text_ends() -> dict[str, int]:
    return {"eos_token_id": id_of("<|im_end|>"), "pad_token_id": id_of("<|endoftext|>")}


def _media() -> dict[str, Any]:
    return {
        "audio_token_id": id_of("<|audio_pad|>"),
        "image_token_id": id_of("<|image_pad|>"),
        "video_token_id": id_of("<|video_pad|>"),
        "audio_start_token_id": id_of("<|audio_start|>"),
        "audio_end_token_id": id_of("<|audio_end|>"),
        "vision_start_token_id": id_of("<|vision_start|>"),
        "vision_end_token_id": id_of("<|vision_end|>"),
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }


def _rope(**more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [8, 4, 4], "interleaved": True, **more}


def _thinker() -> dict[str, Any]:
    text = {
        "vocab_size": VOCAB_SIZE, "hidden_size": _HIDDEN, "intermediate_size": 128, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
        "rope_parameters": _rope(mrope_interleaved=True), "tie_word_embeddings": False, "moe_intermediate_size": 32,
        "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], **text_ends(),
    }  # fmt: skip
    audio = {
        "num_mel_bins": 128, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128, "d_model": 64,
        "max_source_positions": 1500, "n_window": 50, "n_window_infer": 800, "conv_chunksize": 500,
        "downsample_hidden_size": 16, "output_dim": _HIDDEN,
    }  # fmt: skip
    vision = {
        "depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": _HIDDEN, "num_position_embeddings": 64,
        "image_size": 128, "apply_vit_abs_pos_embed": True, "deepstack_visual_indexes": [0, 1, 2],
    }  # fmt: skip
    return {
        "text_config": text, "audio_config": audio, "vision_config": vision, "user_token_id": id_of("user"),
    }  # fmt: skip


def _talker() -> dict[str, Any]:
    shared = {
        "hidden_size": _TALKER_HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    text = {
        "vocab_size": CODES + SILENCED, "intermediate_size": 64, "num_hidden_layers": 3, "rope_parameters": _rope(),
        "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [], **shared,
    }  # fmt: skip
    predictor = {
        "vocab_size": CODES, "intermediate_size": 64, "num_hidden_layers": 2, "num_code_groups": CODEBOOKS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}, **shared,
    }  # fmt: skip
    return {
        "text_config": text, "code_predictor_config": predictor, "num_code_groups": CODEBOOKS,
        "thinker_hidden_size": _HIDDEN, "accept_hidden_layer": ACCEPTED_LAYER, "spatial_merge_size": 2,
        "seconds_per_chunk": 2, "speaker_id": SPEAKERS, "codec_pad_id": _SPECIAL["pad"],
        "codec_bos_id": _SPECIAL["bos"], "codec_eos_token_id": _SPECIAL["eos"],
        **{f"codec_{name}_id": number for name, number in _NOT_THOUGHT.items()},
    }  # fmt: skip


def _code2wav() -> dict[str, Any]:
    """The rates are the hub's: how sound lies at the seams of a stream follows from them."""
    return {
        "codebook_size": CODES, "num_quantizers": CODEBOOKS, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
        "sliding_window": 8, "decoder_dim": 32, "upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2],
        "layer_scale_initial_scale": 0.01, "max_position_embeddings": 8000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }  # fmt: skip
