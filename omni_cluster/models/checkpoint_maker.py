"""Checkpoints of random weights in the hub's layout: what the makers of all families share.

Each tensor has its own generator, seeded by its name, so that neither order nor sharding changes a value.
"""

# torch takes seconds to import and a cached checkpoint does not need it, so the functions import it.
from __future__ import annotations

import fcntl
import json
import math
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_cluster.config.caches import cache_folder
from omni_cluster.memory.sizes import INDEX_NAME, SINGLE_NAME
from omni_cluster.types.errors import ConfigError

if TYPE_CHECKING:
    import torch

MAX_SHARD_BYTES = 5_000_000_000
STORED_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
"""Names of dtypes in files, by torch's."""


@dataclass(frozen=True)
class CheckpointSummary:
    """What was written: parameters of each part, and the bytes of all files together."""

    preset: str
    path: Path
    parts: Mapping[str, int]
    size_bytes: int

    @property
    def parameters(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {count / 1e6:,.1f}" for name, count in self.parts.items())
        return (
            f"{self.preset} checkpoint in {self.path}: {self.parameters / 1e6:,.1f} M parameters ({parts}), "
            f"{self.size_bytes / 1e9:,.2f} GB"
        )


@dataclass(frozen=True)
class Weight:
    """A tensor to be drawn, by the hub's name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def generator(self, seed: int, device: torch.device) -> torch.Generator:
        """What its values are drawn from."""
        import torch

        return torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{self.name}".encode()))


def check_preset(preset: str, presets: Sequence[str]) -> None:
    """Raises ConfigError for one that is none of `presets`."""
    if preset not in presets:
        raise ConfigError(f"preset is {preset!r}: use one of {', '.join(presets)}")


def pick_device(preset: str, device: str | None) -> torch.device:
    """None is the GPU where there is one, but the CPU for tiny, whose files are the same on every host so.

    Raises ConfigError for a device that is not there.
    """
    import torch

    if device is None:
        return torch.device("cuda" if preset != "tiny" and torch.cuda.is_available() else "cpu")
    there = ["cpu", "cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if not torch.cuda.is_available():
        there = ["cpu"]
    if device not in there:
        raise ConfigError(f"device is {device!r}, which this host does not have: use one of {', '.join(there)}")
    return torch.device(device)


def summary(preset: str, path: Path, weights: Sequence[Weight]) -> CheckpointSummary:
    size_bytes = sum(file.stat().st_size for file in path.iterdir())
    return CheckpointSummary(preset, path, count_by_part(weights), size_bytes)


def count_by_part(weights: Sequence[Weight]) -> dict[str, int]:
    """Parameters of each part of the model: a tensor's name begins with its part's."""
    counts: dict[str, int] = {}
    for weight in weights:
        part = weight.name.partition(".")[0]
        counts[part] = counts.get(part, 0) + math.prod(weight.shape)
    return counts


# ----------------------------------------------------------- whole or absent


def made_once(name: str, make: Callable[[Path], object], cache_dir: Path | None = None) -> Path:
    """The folder `name` of the cache, which `make` fills on first use, once for processes that ask together."""
    cache = cache_dir or cache_folder()
    path = cache / name
    if path.is_dir():
        return path
    _make_folder(cache)
    with _exclusive(path.with_suffix(".lock")):
        if not path.is_dir():
            make(path)
    return path


def check_vacant(out: Path) -> None:
    """Raises ConfigError for an `out` that exists and is not an empty folder."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"the checkpoint folder {out} exists and is not an empty folder: name a new one or remove it")


@contextmanager
def renamed_when_whole(out: Path) -> Iterator[Path]:
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


# ------------------------------------------------------------------- weights


def write_weights(
    weights: Sequence[Weight],
    tensor: Callable[[Weight], torch.Tensor],
    folder: Path,
    max_shard_bytes: int,
    progress: Callable[[str], None],
) -> None:
    """Draws `tensor` of each weight and writes them, in several files with an index where one would be too large."""
    from safetensors.torch import save_file

    shards = _shards(weights, max_shard_bytes)
    names = _shard_names(len(shards))
    for shard, name in zip(shards, names, strict=True):
        save_file({weight.name: tensor(weight) for weight in shard}, folder / name, metadata={"format": "pt"})
        progress(f"{name}: {sum(weight.size_bytes for weight in shard) / 1e9:.2f} GB")
    if len(shards) > 1:
        _write_index_of(shards, names, folder)


def write_in_part(
    weights: Sequence[Weight],
    has_values: Callable[[Weight], bool],
    tensor: Callable[[Weight], torch.Tensor],
    folder: Path,
    progress: Callable[[str], None],
) -> None:
    """As `write_weights`, but only those that `has_values` are drawn. The others' file has their names and its whole
    size, and takes no blocks of the disk: their values are drawn as they are loaded.
    """
    from safetensors.torch import save_file

    shards = [[weight for weight in weights if not has_values(weight)], [*filter(has_values, weights)]]
    names = _shard_names(2)
    _write_header(shards[0], folder / names[0])
    progress(f"{names[0]}: {sum(weight.size_bytes for weight in shards[0]) / 1e9:.2f} GB, which are drawn when loaded")
    save_file({weight.name: tensor(weight) for weight in shards[1]}, folder / names[1], metadata={"format": "pt"})
    progress(f"{names[1]}: {sum(weight.size_bytes for weight in shards[1]) / 1e9:.2f} GB")
    _write_index_of(shards, names, folder)


def _write_header(weights: Sequence[Weight], path: Path) -> None:
    """The safetensors format: eight bytes of length, little-endian, then that much JSON, then the values."""
    header, end = dict[str, Any](), 0
    for weight in weights:
        start, end = end, end + weight.size_bytes
        dtype = STORED_DTYPES[str(weight.dtype).removeprefix("torch.")]
        header[weight.name] = {"dtype": dtype, "shape": list(weight.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _shards(weights: Sequence[Weight], max_shard_bytes: int) -> list[list[Weight]]:
    shards: list[list[Weight]] = [[]]
    free_bytes = max_shard_bytes
    for weight in weights:
        if shards[-1] and weight.size_bytes > free_bytes:
            shards.append([])
            free_bytes = max_shard_bytes
        shards[-1].append(weight)
        free_bytes -= weight.size_bytes
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_index_of(shards: list[list[Weight]], names: list[str], folder: Path) -> None:
    weight_map = {weight.name: name for shard, name in zip(shards, names, strict=True) for weight in shard}
    write_index(weight_map, sum(weight.size_bytes for shard in shards for weight in shard), folder)


def write_index(file_of: Mapping[str, str], total_bytes: int, folder: Path) -> None:
    """Writes which file each tensor is in, as the hub has it. `total_bytes`: of all tensors."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(file_of)}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1))
