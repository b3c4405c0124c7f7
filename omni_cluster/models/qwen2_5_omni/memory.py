"""What the memory of the three stages is computed from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omni_cluster.memory.needs import DTYPE_BYTES
from omni_cluster.memory.sizes import ARSizes, SoundSizes, StoredWeights, TowerSizes, WeightGroup
from omni_cluster.models.checkpoint_files import max_image_pixels
from omni_cluster.models.qwen2_5_omni.options import Code2WavOptions

FLOAT32_BYTES = 4
EVALUATIONS = 4
"""Of the velocity in one Runge-Kutta step of the flow."""

VOCODER_BUFFERS = 12
"""Tensors as wide as BigVGAN's widest that are alive at once: 11.02 by tracing its forward pass on the meta device."""

AUDIO_ITEM_TOKENS = 750
"""vLLM's largest audio of this family: 30 s."""

KEPT_ANGLES_BYTES = 64 << 20
"""Of the angles of pictures' patches, kept for the next one of the same size; 1,024 x 1,024 have 1 to 2 MB."""

MAX_IMAGE_PIXELS = 16_384 * 28 * 28
"""The hub's processor, for a checkpoint that does not say."""


def thinker_sizes(folder: Path) -> ARSizes:
    thinker = _config(folder).thinker_config
    # The audio encoder is transformers' own inside vLLM's model, which splits the rest.
    weights = (WeightGroup("thinker."), WeightGroup("thinker.audio_tower.", split=False))
    towers = (_eye(folder, thinker.vision_config), _ear(thinker.audio_config))
    return _decoder(thinker.text_config, weights, towers=towers)


def talker_sizes(folder: Path) -> ARSizes:
    talker = _config(folder).talker_config
    weights = (WeightGroup("talker."), WeightGroup("talker.thinker_to_talker_proj.", split=False))
    return _decoder(talker, weights, rows_size=talker.embedding_size)


def _config(folder: Path) -> Any:
    """Read by transformers, which knows the defaults of what a checkpoint leaves out."""
    from transformers import Qwen2_5OmniConfig

    return Qwen2_5OmniConfig.from_pretrained(folder)


def _eye(folder: Path, vision: Any) -> TowerSizes:
    merged = vision.spatial_merge_size**2
    return TowerSizes(
        modalities=("image", "video"),
        max_tokens=max_image_pixels(folder, MAX_IMAGE_PIXELS) // (vision.patch_size**2 * merged),
        positions_per_token=merged,
        input_size=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        output_size=vision.out_hidden_size,
        kept_bytes=KEPT_ANGLES_BYTES,
    )


def _ear(audio: Any) -> TowerSizes:
    """Two mel frames a position, two positions a token."""
    return TowerSizes(
        modalities=("audio",),
        max_tokens=AUDIO_ITEM_TOKENS,
        positions_per_token=2,
        input_size=2 * audio.num_mel_bins,
        hidden_size=audio.d_model,
        intermediate_size=audio.encoder_ffn_dim,
        output_size=audio.output_dim,
        split=False,
    )


def _decoder(
    config: Any,
    weights: tuple[WeightGroup, ...],
    rows_size: int = 0,
    towers: tuple[TowerSizes, ...] = (),
) -> ARSizes:
    return ARSizes(
        weights=weights,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        rows_size=rows_size,
        towers=towers,
    )


def code2wav_sizes(folder: Path, options: Code2WavOptions) -> SoundSizes:
    config = _config(folder).token2wav_config
    dtype, vocoder_dtype = DTYPE_BYTES[options.dtype], DTYPE_BYTES[options.vocoder_dtype]
    twice = int(options.dtype == "float8")  # small steps need the layers in bfloat16 too
    if options.vocoder_dtype == "float16":
        vocoder_dtype += DTYPE_BYTES["float32"]  # for sound past its range
    # The DiT's stay in its graphs' pool while the vocoder runs. A job larger than a step's bound runs alone.
    frame_bytes = dit_frame_bytes(config.dit_config) + vocoder_frame_bytes(config.bigvgan_config)
    return SoundSizes(
        options=options,
        weights=(
            StoredWeights((WeightGroup("token2wav.code2wav_dit_model."),), dtype + twice),
            StoredWeights((WeightGroup("token2wav.code2wav_bigvgan_model."),), vocoder_dtype),
        ),
        state_bytes=stream_elements(config.dit_config, options.num_steps - 1) * dtype,
        activation_bytes=lambda codes: frame_bytes * max(options.max_batch_frames, codes * config.dit_config.repeats),
        has_graphs=options.cuda_graphs,
    )


def stream_elements(dit: Any, steps: int) -> int:
    """Keys and values, guided and unguided, of one block, for each evaluation and each layer that looks back."""
    inner = dit.num_attention_heads * dit.head_dim
    elements: int = steps * EVALUATIONS * len(dit.look_backward_layers) * 2 * 2 * dit.block_size * inner
    return elements


def dit_frame_bytes(dit: Any) -> int:
    """Of one mel frame, guided and unguided, in float32: what a layer has alive if nothing is freed before its end.

    Residual, condition, norm and output are `hidden_size` wide; query, key, value and attention `inner`; the
    feed-forward twice `ff_mult * hidden_size`.
    """
    inner = dit.num_attention_heads * dit.head_dim
    return 2 * FLOAT32_BYTES * int(4 * dit.hidden_size + 4 * inner + 2 * dit.ff_mult * dit.hidden_size)


def vocoder_frame_bytes(bigvgan: Any) -> int:
    """Of one mel frame in float32: `VOCODER_BUFFERS` of the widest layer, channels x samples a frame."""
    channels, samples, widest = int(bigvgan.upsample_initial_channel), 1, 0
    for rate in bigvgan.upsample_rates:
        channels, samples = channels // 2, samples * rate
        widest = max(widest, channels * samples)
    return FLOAT32_BYTES * VOCODER_BUFFERS * widest
