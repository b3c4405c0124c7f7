"""The configuration of the made checkpoint.

The defaults of transformers' classes are another model's, and some keys that its modules read have none: what is read
stands here.
"""

# transformers takes seconds to import and a reader of a cached checkpoint needs none of it, so the functions import it.
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_cluster.models.qwen3_omni.checkpoint_sizes import SILENCED, SIZES, Sizes
from omni_cluster.models.qwen3_omni.checkpoint_tokens import id_of

if TYPE_CHECKING:
    from transformers import Qwen3OmniMoeConfig


_MARKS = {
    "codec_pad_id": 100, "codec_bos_id": 101, "codec_eos_token_id": 102, "codec_nothink_id": 107,
    "codec_think_bos_id": 108, "codec_think_eos_id": 109,
}  # fmt: skip
_VOICES = {"chelsie": 253, "ethan": 254, "aiden": 255}
"""In the hub's distance from the codes."""


def build_config(preset: str = "tiny") -> Qwen3OmniMoeConfig:
    from transformers import Qwen3OmniMoeConfig

    sizes = SIZES[preset]
    dtype = {"dtype": sizes.dtype}
    return Qwen3OmniMoeConfig(
        thinker_config={**_thinker(sizes), **_media(), **dtype},
        talker_config={**_talker(sizes), **_media(), **dtype},
        code2wav_config={**_code2wav(sizes), **dtype},
        enable_audio_output=True,
        im_start_token_id=id_of("<|im_start|>"),
        im_end_token_id=id_of("<|im_end|>"),
        tts_pad_token_id=id_of("<tts_pad>"),
        tts_bos_token_id=id_of("<tts_text_bos>"),
        tts_eos_token_id=id_of("<tts_text_eod>"),
        system_token_id=id_of("system"),
        user_token_id=id_of("user"),
        assistant_token_id=id_of("assistant"),
        **dtype,
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


def _rope(sizes: Sizes, **more: Any) -> dict[str, Any]:
    return {
        "rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": sizes.mrope_section, "interleaved": True,
        **more,
    }  # fmt: skip


def _thinker(sizes: Sizes) -> dict[str, Any]:
    text = {
        **sizes.text, "rope_parameters": _rope(sizes, mrope_interleaved=True), "tie_word_embeddings": False,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], **text_ends(),
    }  # fmt: skip
    audio = {
        **sizes.audio, "num_mel_bins": 128, "max_source_positions": 1500, "n_window": 50, "n_window_infer": 800,
        "conv_chunksize": 500,
    }  # fmt: skip
    vision = {
        **sizes.vision, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "apply_vit_abs_pos_embed": True,
    }  # fmt: skip
    return {"text_config": text, "audio_config": audio, "vision_config": vision, "user_token_id": id_of("user")}


def _talker(sizes: Sizes) -> dict[str, Any]:
    text = {
        **sizes.talker, "vocab_size": sizes.codes + SILENCED, "rope_parameters": _rope(sizes), "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    predictor = {
        **sizes.predictor, "vocab_size": sizes.codes, "num_code_groups": sizes.codebooks,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    }  # fmt: skip
    return {
        "text_config": text, "code_predictor_config": predictor, "num_code_groups": sizes.codebooks,
        "thinker_hidden_size": sizes.text["hidden_size"], "accept_hidden_layer": sizes.accepted_layer,
        "spatial_merge_size": 2, "seconds_per_chunk": 2,
        **{name: sizes.codes + distance for name, distance in _MARKS.items()},
        "speaker_id": {name: sizes.codes + distance for name, distance in _VOICES.items()},
    }  # fmt: skip


def _code2wav(sizes: Sizes) -> dict[str, Any]:
    """The rates are the hub's: how sound lies at the seams of a stream follows from them."""
    return {
        **sizes.code2wav, "codebook_size": sizes.codes, "num_quantizers": sizes.codebooks,
        "upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2], "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }  # fmt: skip
