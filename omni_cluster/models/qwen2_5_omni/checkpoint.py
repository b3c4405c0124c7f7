"""Qwen2.5-Omni checkpoints in the hub's layout that need no download: toy, which is trained and in the package, and of
random weights tiny for tests, 3b and 7b for measuring.

The random weights are drawn so that greedy output is diverse and depends on the prompt: fan-in scaled projections, unit
embeddings, large heads.
"""

# torch and transformers take seconds to import and a cached checkpoint needs neither, so the functions import them.
from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omni_cluster.models.checkpoint_maker import (
    MAX_SHARD_BYTES,
    CheckpointSummary,
    Weight,
    check_preset,
    check_vacant,
    made_once,
    pick_device,
    renamed_when_whole,
    summary,
    write_weights,
)
from omni_cluster.models.qwen2_5_omni.checkpoint_configs import PRESETS, build_config, text_ends
from omni_cluster.models.qwen2_5_omni.checkpoint_tokens import CHAT_TEMPLATE, TokenLayout, build_tokenizer, token_layout
from omni_cluster.types.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import Qwen2_5OmniConfig, Qwen2Tokenizer

RECIPE_VERSION = 2
# Of the seeds tried, one whose tiny codes change with the voice and with the codec rows for each kind of input.
SEED = 1247
TRAINED = "toy"
TRAINED_FOLDER = Path(__file__).parent / TRAINED
CODEC_CODES = 8192
REF_MEL_FRAMES = 100

_EMBEDDINGS = frozenset({"thinker.model.embed_tokens.weight", "talker.model.embed_tokens.weight"})
_HEADS = frozenset({"thinker.lm_head.weight", "talker.codec_head.weight"})
_BIAS_STD = 0.02
_HEAD_STD = 0.2
# The audio rows would otherwise drown the text rows, and the wave would clip.
_GAINS = {
    "thinker.audio_tower.proj.weight": 0.5,
    "token2wav.code2wav_bigvgan_model.conv_post.weight": 0.004,
}


def make_checkpoint(
    preset: str,
    out: Path,
    *,
    device: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    only: str = "",
    progress: Callable[[str], None] = lambda message: None,
) -> CheckpointSummary:
    """Write the checkpoint of `preset` to the folder `out`, which appears only when it is whole.

    The weights are drawn on `device`; None is the GPU where there is one, but the CPU for tiny, so that its files are
    the same on every host. tiny is float32; 3b and 7b are bfloat16 with a float32 token2wav, as the hub's. `only`: the
    tensors whose names begin so, for a stage that is measured alone, and no tokenizer.
    Raises ConfigError for an unknown or trained preset, a device that is not there, and an `out` that exists and is not
    empty.
    """
    if preset == TRAINED:
        raise ConfigError(
            f"preset is {preset!r}, whose weights are trained and not drawn: copy {TRAINED_FOLDER}, or use one of "
            f"{', '.join(PRESETS)}"
        )
    check_preset(preset, PRESETS)
    check_vacant(out)
    torch_device = pick_device(preset, device)
    weights = [weight for weight in _weights(preset) if weight.name.startswith(only)]
    with renamed_when_whole(out) as folder:
        if not only:
            _write_tokenizer_and_processor(preset, folder)
        _write_configs(preset, folder)
        _write_voices(preset, folder)
        tensor = partial(_draw, tokens=token_layout(preset), device=torch_device)
        write_weights(weights, tensor, folder, max_shard_bytes, progress)
    return summary(preset, out, weights)


def embedded_checkpoint(preset: str = "tiny", cache_dir: Path | None = None) -> Path:
    """The checkpoint that needs no download: the package's own, or one that is made in the cache on first use, once for
    processes that ask together.

    Raises ConfigError for an unknown preset, and where the package lacks its own.
    """
    if preset == TRAINED:
        return shipped(TRAINED_FOLDER)
    check_preset(preset, PRESETS)
    return made_once(f"qwen2_5_omni-{preset}-{RECIPE_VERSION}", partial(make_checkpoint, preset), cache_dir)


def shipped(folder: Path) -> Path:
    """`folder`, which the package has. Raises ConfigError where it was installed in part."""
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model is preset:{folder.name}, but {folder} has no weights: install the package whole")
    return folder


# ------------------------------------------------------------------- weights


def _weights(preset: str) -> list[Weight]:
    """Names, shapes and saved dtypes, in the order of the module that transformers builds; the names are the hub's."""
    import torch
    from transformers import Qwen2_5OmniForConditionalGeneration

    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration(build_config(preset))
    half = torch.float32 if preset == "tiny" else torch.bfloat16
    return [
        Weight(name, tuple(tensor.shape), torch.float32 if name.startswith("token2wav.") else half)
        for name, tensor in model.state_dict().items()
    ]


def _draw(weight: Weight, tokens: TokenLayout, device: torch.device) -> torch.Tensor:
    import torch

    tensor = torch.empty(weight.shape, dtype=weight.dtype, device=device)
    if len(weight.shape) == 1 and not weight.name.endswith("bias"):
        return tensor.fill_(_neutral(weight.name))
    tensor.normal_(0, _std(weight), generator=weight.generator(SEED, device))
    if weight.name in _HEADS:
        _silence_absent_ids(tensor, weight.name, tokens)
    return tensor


def _neutral(name: str) -> float:
    """Norm weights are 1; BigVGAN's snake activations keep the logarithm of their 1."""
    return 0.0 if name.endswith((".alpha", ".beta")) else 1.0


def _std(weight: Weight) -> float:
    if weight.name.endswith("bias"):
        return _BIAS_STD
    if weight.name in _EMBEDDINGS:
        return 1.0
    if weight.name in _HEADS:
        return _HEAD_STD
    return float(_GAINS.get(weight.name, 1.0) * _fan_in(weight) ** -0.5)


def _fan_in(weight: Weight) -> int:
    # A transposed convolution is stored [in, out, kernel] and about two of its taps meet in one output sample.
    return weight.shape[0] * 2 if ".ups." in weight.name else math.prod(weight.shape[1:])


def _silence_absent_ids(head: torch.Tensor, name: str, tokens: TokenLayout) -> None:
    """Zero rows give logit 0, below the largest of the others, so no id is made that the tokenizer or codec lacks."""
    if name == "talker.codec_head.weight":
        head[CODEC_CODES:] = 0
        return
    eos = tokens.id_of("<|im_end|>")
    head[tokens.base : eos] = 0
    head[eos + 1 :] = 0


def _write_voices(preset: str, folder: Path) -> None:
    import torch

    generator = torch.Generator().manual_seed(7)
    voices = {
        voice: {
            "bos_token": bos_token,
            "cond": torch.randn(1, 192, generator=generator),
            "ref_mel": torch.randn(1, REF_MEL_FRAMES, 80, generator=generator) - 4.0,
        }
        for voice, bos_token in token_layout(preset).voices.items()
    }
    torch.save(voices, folder / "spk_dict.pt")


# ------------------------------------------------------ tokenizer and processor


def _write_tokenizer_and_processor(preset: str, folder: Path) -> None:
    write_processor(build_tokenizer(preset), *pixel_limits(preset), folder)


def write_processor(
    tokenizer: Qwen2Tokenizer, image_pixels: dict[str, int], video_pixels: dict[str, int], folder: Path
) -> None:
    """Writes all of a checkpoint by which text, sounds and pictures become the thinker's input."""
    from transformers import (
        Qwen2_5OmniProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        WhisperFeatureExtractor,
    )

    patches = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(size=image_pixels, **patches),
        video_processor=Qwen2VLVideoProcessor(size=video_pixels, **patches),
        feature_extractor=WhisperFeatureExtractor(
            feature_size=128, sampling_rate=16000, hop_length=160, chunk_length=300, n_fft=400, padding_value=0.0,
            return_attention_mask=True, dither=0.0,
        ),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip


def pixel_limits(preset: str) -> tuple[dict[str, int], dict[str, int]]:
    """Least and most pixels of an image and of a video frame; tiny allows 64 thinker tokens an image."""
    if preset == "tiny":
        tiny = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}
        return tiny, tiny
    image = {"shortest_edge": 4 * 28 * 28, "longest_edge": 16384 * 28 * 28}
    return image, {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}


# ------------------------------------------------------------------- configs


def _write_configs(preset: str, folder: Path) -> None:
    write_configs(build_config(preset), token_layout(preset), folder)


def write_configs(config: Qwen2_5OmniConfig, tokens: TokenLayout, folder: Path) -> None:
    from transformers import GenerationConfig

    config.architectures = ["Qwen2_5OmniModel"]
    config.save_pretrained(folder)
    GenerationConfig(**text_ends(tokens)).save_pretrained(folder)
