"""Random-weight Qwen2.5-Omni checkpoints in the hub's layout: tiny for tests and first use, 3b and 7b for measuring.

The weights are drawn so that greedy output is diverse and depends on the prompt: fan-in scaled projections, unit
embeddings, large heads. Each tensor has its own generator, seeded by its name, so that neither order nor sharding
changes a value.
"""

# torch and transformers take seconds to import and a cached checkpoint needs neither, so the functions import them.
from __future__ import annotations

import fcntl
import json
import math
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omni_cluster.config.caches import cache_folder
from omni_cluster.models.qwen2_5_omni.checkpoint_configs import PRESETS, build_config, text_ends
from omni_cluster.models.qwen2_5_omni.checkpoint_tokens import CHAT_TEMPLATE, TokenLayout, build_tokenizer, token_layout
from omni_cluster.types.errors import ConfigError

if TYPE_CHECKING:
    import torch

RECIPE_VERSION = 2
# Of the seeds tried, one whose tiny codes change with the voice and with the codec rows for each kind of input.
SEED = 1247
MAX_SHARD_BYTES = 5_000_000_000
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


@dataclass(frozen=True)
class CheckpointSummary:
    """What `make_checkpoint` wrote: parameters of each part, and the bytes of all files together."""

    preset: str
    path: Path
    thinker_parameters: int
    talker_parameters: int
    token2wav_parameters: int
    size_bytes: int

    @property
    def parameters(self) -> int:
        return self.thinker_parameters + self.talker_parameters + self.token2wav_parameters

    def __str__(self) -> str:
        return (
            f"{self.preset} checkpoint in {self.path}: {self.parameters / 1e6:,.1f} M parameters "
            f"(thinker {self.thinker_parameters / 1e6:,.1f}, talker {self.talker_parameters / 1e6:,.1f}, "
            f"token2wav {self.token2wav_parameters / 1e6:,.1f}), {self.size_bytes / 1e9:,.2f} GB"
        )


@dataclass(frozen=True)
class _Weight:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


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
    Raises ConfigError for an unknown preset, a device that is not there, and an `out` that exists and is not empty.
    """
    _check_preset(preset)
    _check_vacant(out)
    torch_device = _pick_device(preset, device)
    weights = [weight for weight in _weights(preset) if weight.name.startswith(only)]
    with _renamed_when_whole(out) as folder:
        if not only:
            _write_tokenizer_and_processor(preset, folder)
        _write_configs(preset, folder)
        _write_voices(preset, folder)
        tensor = partial(_draw, tokens=token_layout(preset), device=torch_device)
        _write_weights(weights, tensor, folder, max_shard_bytes, progress)
    return _summary(preset, out, weights)


def embedded_checkpoint(preset: str = "tiny", cache_dir: Path | None = None) -> Path:
    """The checkpoint that needs no download, made in the cache on first use, once for processes that ask together.

    Raises ConfigError for an unknown preset.
    """
    _check_preset(preset)
    cache = cache_dir or cache_folder()
    path = cache / f"qwen2_5_omni-{preset}-{RECIPE_VERSION}"
    if path.is_dir():
        return path
    _make_folder(cache)
    with _exclusive(path.with_suffix(".lock")):
        if not path.is_dir():
            make_checkpoint(preset, path)
    return path


def _check_preset(preset: str) -> None:
    if preset not in PRESETS:
        raise ConfigError(f"preset is {preset!r}: use one of {', '.join(PRESETS)}")


def _check_vacant(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"the checkpoint folder {out} exists and is not an empty folder: name a new one or remove it")


def _pick_device(preset: str, device: str | None) -> torch.device:
    import torch

    if device is None:
        return torch.device("cuda" if preset != "tiny" and torch.cuda.is_available() else "cpu")
    there = ["cpu", "cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if not torch.cuda.is_available():
        there = ["cpu"]
    if device not in there:
        raise ConfigError(f"device is {device!r}, which this host does not have: use one of {', '.join(there)}")
    return torch.device(device)


# ----------------------------------------------------------- whole or absent


@contextmanager
def _renamed_when_whole(out: Path) -> Iterator[Path]:
    """A sibling folder to write into, renamed to `out` at the end: a killed writer leaves no half of a checkpoint."""
    folder = out.parent / f".{out.name}.{uuid.uuid4().hex}.partial"
    _make_folder(folder)
    try:
        yield folder
        folder.replace(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} cannot be made ({error.strerror}): name one that can be written"
        ) from error


def _summary(preset: str, path: Path, weights: list[_Weight]) -> CheckpointSummary:
    counts = _count_by_part(weights)
    size_bytes = sum(file.stat().st_size for file in path.iterdir())
    return CheckpointSummary(preset, path, counts["thinker"], counts["talker"], counts["token2wav"], size_bytes)


def _count_by_part(weights: list[_Weight]) -> dict[str, int]:
    counts = dict.fromkeys(("thinker", "talker", "token2wav"), 0)
    for weight in weights:
        counts[weight.name.partition(".")[0]] += math.prod(weight.shape)
    return counts


# ------------------------------------------------------------------- weights


def _weights(preset: str) -> list[_Weight]:
    """Names, shapes and saved dtypes, in the order of the module that transformers builds; the names are the hub's."""
    import torch
    from transformers import Qwen2_5OmniForConditionalGeneration

    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration(build_config(preset))
    half = torch.float32 if preset == "tiny" else torch.bfloat16
    return [
        _Weight(name, tuple(tensor.shape), torch.float32 if name.startswith("token2wav.") else half)
        for name, tensor in model.state_dict().items()
    ]


def _draw(weight: _Weight, tokens: TokenLayout, device: torch.device) -> torch.Tensor:
    import torch

    tensor = torch.empty(weight.shape, dtype=weight.dtype, device=device)
    if len(weight.shape) == 1 and not weight.name.endswith("bias"):
        return tensor.fill_(_neutral(weight.name))
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{SEED}/{weight.name}".encode()))
    tensor.normal_(0, _std(weight), generator=generator)
    if weight.name in _HEADS:
        _silence_absent_ids(tensor, weight.name, tokens)
    return tensor


def _neutral(name: str) -> float:
    """Norm weights are 1; BigVGAN's snake activations keep the logarithm of their 1."""
    return 0.0 if name.endswith((".alpha", ".beta")) else 1.0


def _std(weight: _Weight) -> float:
    if weight.name.endswith("bias"):
        return _BIAS_STD
    if weight.name in _EMBEDDINGS:
        return 1.0
    if weight.name in _HEADS:
        return _HEAD_STD
    return float(_GAINS.get(weight.name, 1.0) * _fan_in(weight) ** -0.5)


def _fan_in(weight: _Weight) -> int:
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


def _write_weights(
    weights: list[_Weight],
    tensor: Callable[[_Weight], torch.Tensor],
    folder: Path,
    max_shard_bytes: int,
    progress: Callable[[str], None],
) -> None:
    from safetensors.torch import save_file

    shards = _shards(weights, max_shard_bytes)
    names = _shard_names(len(shards))
    for shard, name in zip(shards, names, strict=True):
        save_file({weight.name: tensor(weight) for weight in shard}, folder / name, metadata={"format": "pt"})
        progress(f"{name}: {sum(weight.size_bytes for weight in shard) / 1e9:.2f} GB")
    if len(shards) > 1:
        _write_index(shards, names, folder)


def _shards(weights: list[_Weight], max_shard_bytes: int) -> list[list[_Weight]]:
    shards: list[list[_Weight]] = [[]]
    room = max_shard_bytes
    for weight in weights:
        if shards[-1] and weight.size_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(weight)
        room -= weight.size_bytes
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_index(shards: list[list[_Weight]], names: list[str], folder: Path) -> None:
    weight_map = {weight.name: name for shard, name in zip(shards, names, strict=True) for weight in shard}
    total_size = sum(weight.size_bytes for shard in shards for weight in shard)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


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
    from transformers import (
        Qwen2_5OmniProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        WhisperFeatureExtractor,
    )

    patches = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    image_pixels, video_pixels = pixel_limits(preset)
    Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(size=image_pixels, **patches),
        video_processor=Qwen2VLVideoProcessor(size=video_pixels, **patches),
        feature_extractor=WhisperFeatureExtractor(
            feature_size=128, sampling_rate=16000, hop_length=160, chunk_length=300, n_fft=400, padding_value=0.0,
            return_attention_mask=True, dither=0.0,
        ),
        tokenizer=build_tokenizer(preset),
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
    from transformers import GenerationConfig

    tokens = token_layout(preset)
    config = build_config(preset)
    config.architectures = ["Qwen2_5OmniModel"]
    config.save_pretrained(folder)
    GenerationConfig(**text_ends(tokens)).save_pretrained(folder)
