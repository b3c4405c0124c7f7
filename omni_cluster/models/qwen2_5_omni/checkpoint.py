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
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_cluster.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import Qwen2_5OmniConfig, Qwen2Tokenizer

PRESETS: tuple[str, ...] = ("tiny", "3b", "7b")
RECIPE_VERSION = 1
# Of the seeds tried, one whose tiny codes change with the voice and with the codec rows for each kind of input.
SEED = 1247
MAX_SHARD_BYTES = 5_000_000_000
CODEC_CODES = 8192
REF_MEL_FRAMES = 100

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_bos|>", "<|vision_eos|>", "<|vision_pad|>", "<|IMAGE|>", "<|VIDEO|>",
)  # fmt: skip
TOOL_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
NAMED_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}

CHAT_TEMPLATE = (
    "{% set audio_count = namespace(value=0) %}{% set image_count = namespace(value=0) %}"
    "{% set video_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif content['type'] == 'audio' or 'audio' in content or 'audio_url' in content or 'input_audio' in content %}"
    "{% set audio_count.value = audio_count.value + 1 %}"
    "{% if add_audio_id %}Audio {{ audio_count.value }}: {% endif %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif content['type'] == 'video' or 'video' in content or 'video_url' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TRAINING_TEXT = (
    "system user assistant You are a helpful assistant. Describe the audio. Describe the image. "
    "Hello world, what is in the picture? Please answer in speech and text. "
)

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
class TokenLayout:
    """Where ids lie in the text vocabulary: `base` byte-pair ids, then the named tokens, then ids that no text has."""

    base: int
    named: tuple[str, ...]
    tts_text_pad: int
    tts_text_start: int
    tts_text_end: int
    chelsie: int
    ethan: int

    def id_of(self, token: str) -> int:
        return self.base + self.named.index(token)

    @property
    def voices(self) -> dict[str, int]:
        return {"Chelsie": self.chelsie, "Ethan": self.ethan}


@dataclass(frozen=True)
class _Weight:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


TINY_TOKENS = TokenLayout(400, SPECIAL_TOKENS, 480, 481, 482, chelsie=490, ethan=491)
HUB_TOKENS = TokenLayout(151643, SPECIAL_TOKENS + TOOL_TOKENS, 151859, 151860, 151861, chelsie=151872, ethan=151870)


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
    cache = cache_dir or _platform_cache_dir()
    path = cache / f"qwen2_5_omni-{preset}-{RECIPE_VERSION}"
    if path.is_dir():
        return path
    _make_folder(cache)
    with _exclusive(path.with_suffix(".lock")):
        if not path.is_dir():
            make_checkpoint(preset, path)
    return path


def token_layout(preset: str) -> TokenLayout:
    return TINY_TOKENS if preset == "tiny" else HUB_TOKENS


def parameter_counts(preset: str) -> dict[str, int]:
    """Parameters of the thinker, the talker and token2wav, without memory taken for one of them."""
    return _count_by_part(_weights(preset))


def build_tokenizer(preset: str) -> Qwen2Tokenizer:
    """A byte-level BPE whose ids lie as `token_layout` says; 3b and 7b make one token of each byte of text."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    tokens = token_layout(preset)
    vocab, merges = _trained_pairs(tokens.base) if preset == "tiny" else (_bytes_then_words(tokens.base), [])
    # Already in the vocabulary, so that each keeps its own id whatever the order in which the tokenizer adds them.
    vocab.update({token: tokens.id_of(token) for token in tokens.named})
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=merges, unk_token=None, bos_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        extra_special_tokens=NAMED_TOKENS, model_max_length=32768,
    )  # fmt: skip
    tokenizer.add_tokens([AddedToken(t, special=t in SPECIAL_TOKENS, normalized=False) for t in tokens.named])
    return tokenizer


# ------------------------------------------------------------------ checks


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


def _platform_cache_dir() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "omni_cluster"


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


def _trained_pairs(size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of `size` ids: the bytes, and pairs of a short text, so that merging is exercised."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=1, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TRAINING_TEXT * 4], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = {str(piece): int(index) for piece, index in model["vocab"].items()}
    vocab.update({f"ĠĠunused{index}": index for index in range(len(vocab), size)})
    return vocab, [(str(left), str(right)) for left, right in model["merges"]]


def _bytes_then_words(size: int) -> dict[str, int]:
    """The 256 bytes in the hub's order, then harmless words, which encoding never makes because nothing merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = [chr(256 + offset) for offset in range(256 - len(printable))]
    vocab = {piece: index for index, piece in enumerate([*map(chr, printable), *stand_ins])}
    vocab.update({f"Ġw{index}": index for index in range(len(vocab), size)})
    return vocab


def _write_tokenizer_and_processor(preset: str, folder: Path) -> None:
    from transformers import (
        Qwen2_5OmniProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        WhisperFeatureExtractor,
    )

    patches = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    image_pixels, video_pixels = _pixel_limits(preset)
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


def _pixel_limits(preset: str) -> tuple[dict[str, int], dict[str, int]]:
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
    GenerationConfig(**_text_ends(tokens)).save_pretrained(folder)


def build_config(preset: str) -> Qwen2_5OmniConfig:
    from transformers import Qwen2_5OmniConfig

    sizes = {"tiny": _tiny_sizes, "3b": _3b_sizes, "7b": _7b_sizes}[preset]()
    tokens = token_layout(preset)
    dtype = "float32" if preset == "tiny" else "bfloat16"
    return Qwen2_5OmniConfig(
        thinker_config={**sizes["thinker"], **_media_ids(tokens), **_text_ends(tokens), "dtype": dtype},
        talker_config={**sizes["talker"], **_media_ids(tokens), **_speech_ids(tokens), "dtype": dtype},
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


def _text_ends(tokens: TokenLayout) -> dict[str, int]:
    return {
        "bos_token_id": tokens.id_of("<|im_start|>"),
        "eos_token_id": tokens.id_of("<|im_end|>"),
        "pad_token_id": tokens.id_of("<|endoftext|>"),
    }


def _speech_ids(tokens: TokenLayout) -> dict[str, int]:
    return {
        "tts_text_pad_token_id": tokens.tts_text_pad,
        "tts_text_start_token_id": tokens.tts_text_start,
        "tts_text_end_token_id": tokens.tts_text_end,
        "tts_codec_pad_token_id": 8292,
        "tts_codec_start_token_id": 8293,
        "tts_codec_end_token_id": 8294,
        "tts_codec_mask_token_id": 8296,
    }


def _mrope(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": list(sections)}


def _tiny_sizes() -> dict[str, dict[str, Any]]:
    hidden = 128
    thinker = {
        "user_token_id": 1,
        "text_config": {
            "vocab_size": 512, "hidden_size": hidden, "intermediate_size": 256, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
            "rope_parameters": _mrope(4, 6, 6), "tie_word_embeddings": False,
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
        "rope_parameters": _mrope(4, 6, 6),
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
        "num_attention_heads": 28, "num_key_value_heads": 4, "rope_parameters": _mrope(16, 24, 24),
    }  # fmt: skip
    talker = {
        "embedding_size": 3584, "intermediate_size": 18944, "num_attention_heads": 12, "num_key_value_heads": 4,
        "head_dim": 128, "rope_parameters": _mrope(16, 24, 24),
    }  # fmt: skip
    return _hub_sizes(text, talker)


def _3b_sizes() -> dict[str, dict[str, Any]]:
    text = {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "rope_parameters": _mrope(16, 24, 24),
    }  # fmt: skip
    talker = {
        "embedding_size": 2048, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
        "head_dim": 64, "rope_parameters": _mrope(16, 16, 0),
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
