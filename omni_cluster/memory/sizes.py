"""What a stage's memory is computed from: sizes that its family reads from a checkpoint's configuration and headers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_cluster.config.sound_options import SoundOptions
from omni_cluster.types.errors import ConfigError

GIB = 1 << 30
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
EXPERTS = ".experts."
"""In the names of what only some tokens of a step go through, and not in those of what chooses it."""
FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
OTHER_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Tensors of the checkpoint under `prefix`; `split`: over the cards of a tensor-parallel group, or whole on each.

    A tensor belongs to the group with the longest prefix of its name.
    """

    prefix: str
    split: bool = True


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """An encoder of media.

    `max_tokens` of one item come out, `output_size` wide; each has `positions_per_token` positions inside, which enter
    with `input_size` values. `modalities`: what of `limit_mm_per_prompt` it reads. `kept_bytes`: what it keeps of one
    item for the next at most.
    """

    modalities: tuple[str, ...]
    max_tokens: int
    positions_per_token: int
    input_size: int
    hidden_size: int
    intermediate_size: int
    output_size: int
    split: bool = True
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ARSizes:
    """An autoregressive stage.

    `intermediate_size`: of all experts that a token takes, where there are some. `rows_size`: width of the rows that
    enter it, 0 for none; `buffers_size`: of what its model keeps of each position of a step; `residual_codes`: how many
    codes its model makes of each token beside the sampled one.
    `made_elements`: of weights that it makes as it loads, as a table that is projected once, whole on each card;
    `request_elements`: what it keeps of each running request beside the KV cache. `adapter_elements`: of LoRA
    adapters, whole on each card.
    """

    weights: tuple[WeightGroup, ...]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rows_size: int = 0
    buffers_size: int = 0
    residual_codes: int = 0
    made_elements: int = 0
    request_elements: int = 0
    adapter_elements: int = 0
    towers: tuple[TowerSizes, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Weights that take so many bytes an element on the card, all copies of them together."""

    groups: tuple[WeightGroup, ...]
    element_bytes: int


@dataclass(frozen=True, slots=True)
class SoundSizes:
    """A sound stage as its `options` have it.

    `state_bytes`: what a stream keeps between two pieces. `activation_bytes`: of the largest pass, where requests have
    so many codes at most. `has_graphs`: CUDA graphs are captured.
    """

    options: SoundOptions
    weights: tuple[StoredWeights, ...]
    state_bytes: int
    activation_bytes: Callable[[int], int]
    has_graphs: bool

    @property
    def groups(self) -> tuple[WeightGroup, ...]:
        return tuple(group for stored in self.weights for group in stored.groups)


StageSizes = ARSizes | SoundSizes


def weight_bytes(
    folder: Path,
    groups: tuple[WeightGroup, ...],
    dtype_bytes: int,
    tensor_parallel_size: int,
    expert_bytes: int | None = None,
) -> int:
    """Bytes on one card of the tensors in `groups`, floats in a dtype of `dtype_bytes`; only headers are read.

    `expert_bytes`: the same of experts, where these are quantized. Raises ConfigError where the folder has no weights.
    """
    whole = {group: 0 for group in groups}
    for name, size in _tensor_bytes(folder, dtype_bytes, expert_bytes or dtype_bytes):
        inside = [group for group in groups if name.startswith(group.prefix)]
        if inside:
            whole[max(inside, key=lambda group: len(group.prefix))] += size
    return sum(math.ceil(size / tensor_parallel_size) if group.split else size for group, size in whole.items())


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Of all tensors of a checkpoint, by name; only headers are read. Raises ConfigError as `weight_bytes`."""
    return {name: tensor["shape"] for name, tensor in stored_tensors(folder)}


def _tensor_bytes(folder: Path, dtype_bytes: int, expert_bytes: int) -> Iterator[tuple[str, int]]:
    for name, tensor in stored_tensors(folder):
        of_floats = expert_bytes if EXPERTS in name else dtype_bytes
        each = of_floats if tensor["dtype"] in FLOAT_DTYPES else OTHER_BYTES[tensor["dtype"]]
        yield name, math.prod(tensor["shape"]) * each


def stored_tensors(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of a checkpoint's tensors, with what the headers say of each."""
    for path in _weight_files(folder):
        yield from ((name, tensor) for name, tensor in _checked_header(path).items() if name != "__metadata__")


def _checked_header(path: Path) -> dict[str, Any]:
    try:
        return header_of(path)
    except (ValueError, MemoryError, OverflowError):  # the length is what the file begins with, whatever that is
        raise ConfigError(
            f"{path} is no safetensors file, so the weights cannot be counted; "
            f"download it again, with Git LFS if it comes from a repository of that."
        ) from None


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {SINGLE_NAME}
    paths = [folder / name for name in sorted(names)]
    missing = next((path for path in paths if not path.is_file()), None)
    if missing is not None:
        raise ConfigError(f"{missing} is missing, so the weights cannot be counted; name a whole checkpoint's folder.")
    return paths


def header_of(path: Path) -> dict[str, Any]:
    """The safetensors format: eight bytes of length, little-endian, then that much JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    return header


def stated_bytes(path: Path) -> int:
    """The size of a safetensors file as its header has it; one that was cut off is smaller."""
    with path.open("rb") as file:
        begins = 8 + int.from_bytes(file.read(8), "little")
    ends = (tensor["data_offsets"][1] for name, tensor in header_of(path).items() if name != "__metadata__")
    return begins + int(max(ends, default=0))


def gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f}"
