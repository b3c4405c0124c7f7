"""Random-weight Qwen3-Omni checkpoints in the hub's layout: tiny for tests, 30b for measurements on cards.

The files of 30b have names and sizes of thinker and talker, and no values: these are drawn as an engine loads them,
with `load_format: drawn`.

Weights that training begins at nothing are drawn too, or all behind them would be dead: the layer scales and the
ConvNeXt gammas of code2wav, and what its snake activations bend by.
"""

# torch and transformers take seconds to import and a cached checkpoint needs neither, so the functions import them.
from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
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
    write_in_part,
    write_weights,
)
from omni_cluster.models.qwen3_omni.checkpoint_configs import build_config, text_ends
from omni_cluster.models.qwen3_omni.checkpoint_sizes import SILENCED, SIZES
from omni_cluster.models.qwen3_omni.checkpoint_tokens import BASE, CHAT_TEMPLATE, VOCAB_SIZE, build_tokenizer, id_of

if TYPE_CHECKING:
    import torch

PRESETS = ("tiny",)
"""Those that are made on first use."""
RECIPE_VERSION = 2
SEED = 1

_EMBEDDING = re.compile(r"embed_tokens|codec_embedding|code_embedding")
_HEAD = re.compile(r"lm_head|codec_head")
_SNAKE = re.compile(r"\.(alpha|beta)$")
_LAYER_SCALE = re.compile(r"\.(scale|gamma)$")
_TRANSPOSED = re.compile(r"\.block\.1\.conv\.weight$|\.upsample\.\d\.0\.conv\.weight$")
_BIAS_STD = 0.02
_SNAKE_STD = 0.3
_LOGIT_STD = 2.0
_WAVE_GAIN = 0.05
"""Of the last convolution: waves reach some half of their range, so that nothing is cut off."""
_RESIDUAL = re.compile(r"\.block\.\d\.conv[12]\.conv\.weight$")
_RESIDUAL_GAIN = 0.5
"""Of code2wav's residual units: they would make of a rounding a difference that can be heard."""


def make_checkpoint(
    preset: str,
    out: Path,
    *,
    device: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[str], None] = lambda message: None,
) -> CheckpointSummary:
    """Write the checkpoint of `preset` to the folder `out`, which appears only when it is whole.

    Raises ConfigError for an unknown preset, a device that is not there, and an `out` that exists and is not empty.
    """
    check_preset(preset, [*SIZES])
    check_vacant(out)
    tensor = partial(drawn, device=pick_device(preset, device))
    weights = _weights(preset)
    with renamed_when_whole(out) as folder:
        _write_tokenizer_and_processor(folder, preset)
        _write_configs(folder, preset)
        if preset in PRESETS:
            write_weights(weights, tensor, folder, max_shard_bytes, progress)
        else:
            write_in_part(weights, lambda weight: weight.name.startswith("code2wav."), tensor, folder, progress)
    return summary(preset, out, weights)


def embedded_checkpoint(preset: str = "tiny", cache_dir: Path | None = None) -> Path:
    """The checkpoint that needs no download, made in the cache on first use, once for processes that ask together.

    Raises ConfigError for an unknown preset.
    """
    check_preset(preset, PRESETS)
    return made_once(f"qwen3_omni-{preset}-{RECIPE_VERSION}", partial(make_checkpoint, preset), cache_dir)


# ------------------------------------------------------------------- weights


def _weights(preset: str = "tiny") -> list[Weight]:
    """Names and shapes of the hub, in the order of the module that transformers builds."""
    import torch
    from transformers import Qwen3OmniMoeForConditionalGeneration

    with torch.device("meta"):
        model = Qwen3OmniMoeForConditionalGeneration(build_config(preset))
    tensors = [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()]
    dtype: torch.dtype = getattr(torch, SIZES[preset].dtype)
    return [Weight(*each, dtype) for name, shape in tensors for each in _apart(name, shape)]


def _apart(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """transformers has all experts of a layer in one tensor, two of three products at once; the hub has each alone."""
    layer, is_experts, kind = name.partition(".experts.")
    if not is_experts:
        yield name, shape
        return
    projections = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    for expert in range(shape[0]):
        for projection in projections:
            yield f"{layer}.experts.{expert}.{projection}.weight", (shape[1] // len(projections), shape[2])


def drawn(weight: Weight, device: torch.device) -> torch.Tensor:
    """A tensor of a checkpoint by its name and shape; the same on every host with such a device."""
    import torch

    std = _std(weight)
    tensor = torch.empty(weight.shape, dtype=weight.dtype, device=device)
    tensor.normal_(_mean(weight), std, generator=weight.generator(SEED, device))
    if weight.name == "talker.codec_head.weight":
        tensor[-SILENCED:] = 0
    if weight.name == "thinker.lm_head.weight":
        _silence_absent_ids(tensor)
    return tensor


def _mean(weight: Weight) -> float:
    if _LAYER_SCALE.search(weight.name):
        return 0.5
    return 1.0 if _is_norm(weight) else 0.0


def _std(weight: Weight) -> float:
    if _is_norm(weight) or _LAYER_SCALE.search(weight.name):
        return 0.1
    if _SNAKE.search(weight.name):
        return _SNAKE_STD
    if weight.name.endswith("bias"):
        return _BIAS_STD
    if _EMBEDDING.search(weight.name):
        return 1.0
    return float(_gain(weight) * _fan_in(weight) ** -0.5)


def _gain(weight: Weight) -> float:
    if _HEAD.search(weight.name):
        return _LOGIT_STD
    if _RESIDUAL.search(weight.name):
        return _RESIDUAL_GAIN
    return _WAVE_GAIN if weight.name == "code2wav.decoder.6.conv.weight" else 1.0


def _is_norm(weight: Weight) -> bool:
    return len(weight.shape) == 1 and weight.name.endswith("weight")


def _fan_in(weight: Weight) -> int:
    """A transposed convolution is stored [in, out, kernel], and two of its taps at most meet in one output sample."""
    if _TRANSPOSED.search(weight.name):
        return weight.shape[0] * (2 if ".block." in weight.name else 1)
    return math.prod(weight.shape[1:])


def _silence_absent_ids(head: torch.Tensor) -> None:
    """Zero rows give logit 0, below the largest of the others: `tiny` makes no id that is not text or its end."""
    end = id_of("<|im_end|>")
    head[BASE:end] = 0
    head[end + 1 : VOCAB_SIZE] = 0


# --------------------------------------------- tokenizer, processor, configs


def _write_tokenizer_and_processor(folder: Path, preset: str) -> None:
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3OmniMoeProcessor,
        WhisperFeatureExtractor,
    )

    # The hub's patches: transformers' processor scales frames by numbers of its own, which are made for these.
    patches = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    pixels = {"shortest_edge": 4 * 32 * 32, "longest_edge": 64 * 32 * 32}
    Qwen3OmniMoeProcessor(
        image_processor=Qwen2VLImageProcessor(size=pixels, **patches),
        video_processor=Qwen2VLVideoProcessor(size=pixels, **patches),
        feature_extractor=WhisperFeatureExtractor(
            feature_size=128, sampling_rate=16000, hop_length=160, chunk_length=30, n_fft=400, padding_value=0.0,
            return_attention_mask=True, dither=0.0,
        ),
        tokenizer=build_tokenizer(SIZES[preset].text["vocab_size"]),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip


def _write_configs(folder: Path, preset: str) -> None:
    from transformers import GenerationConfig

    config = build_config(preset)
    config.architectures = ["Qwen3OmniMoeForConditionalGeneration"]
    config.save_pretrained(folder)
    GenerationConfig(**text_ends()).save_pretrained(folder)
