"""What stages hand to each other as bytes: tensors, alone and by name, and the conditioning rows of a request.

Every header is checked before memory is taken, and nothing here is ever unpickled or given to `torch.load`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from omni_cluster.errors import PayloadError

if TYPE_CHECKING:  # who carries no tensor starts without torch: the functions import it
    import torch

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}
)
"""The dtypes that are carried, by torch's names for them."""

HASH_BYTES = 32
"""Of the hash of a block: SHA-256, vLLM's default."""

LARGE_BYTES = 1 << 20
"""What has so many bytes is not joined with what follows it: that would be a copy of milliseconds."""

# Rows carry their dtype as a number: the place in this tuple is part of the wire format, so only append.
_DTYPE_CODES = tuple(ITEM_BYTES)
_CODE_BYTES = tuple(ITEM_BYTES.values())
_MAX_DIMS = 4
# A zero among the dims hides the others from the element count, but torch still multiplies them into strides.
_MAX_EXTENT = 2**40
_MAX_ENTRIES = 1024


class PromptEmbedsPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor as bytes, in the form that passes through vLLM's untyped `extra_args`.

    `data` holds the elements in row-major order, little-endian as the host keeps them; `dtype` is a key of
    `ITEM_BYTES`; `shape` has one to four dimensions.
    """

    data: bytes
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=_MAX_DIMS)]
    dtype: str

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> PromptEmbedsPayload:
        """Copy a dense tensor of any device. Raises PayloadError for a dtype or a rank that is not carried."""
        import torch

        name = _name_of(tensor.dtype)
        _check_carried(tensor)
        # numpy knows no bfloat16, so every dtype leaves torch as bytes.
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return cls(data=raw.numpy().tobytes(), shape=tuple(tensor.shape), dtype=name)

    def to_tensor(self, *, max_elements: int) -> torch.Tensor:
        """The tensor on the CPU, in writable memory of its own.

        Raises PayloadError when the header is not allowed, exceeds `max_elements` or does not match the bytes.
        """
        import torch

        elements = self.count(max_elements=max_elements)
        dtype = _dtype_named(self.dtype)
        if elements == 0:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).view(self.shape)

    def count(self, *, max_elements: int) -> int:
        """Number of elements, after every check of the header; takes no memory. Raises PayloadError."""
        item_bytes = _item_bytes(self.dtype)
        elements = _count_elements(self.shape, max_elements)
        if len(self.data) != elements * item_bytes:
            raise PayloadError(
                f"The payload has {len(self.data)} bytes, but shape {list(self.shape)} of {self.dtype} "
                f"takes {elements * item_bytes}."
            )
        return elements


class AdditionalInformationPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Named tensors that travel with a request from one stage to the next."""

    entries: Annotated[dict[str, PromptEmbedsPayload], msgspec.Meta(max_length=_MAX_ENTRIES)]

    @classmethod
    def from_mapping(cls, tensors: Mapping[str, torch.Tensor]) -> AdditionalInformationPayload:
        """Copies each tensor. Raises PayloadError for a dtype or a rank that is not carried."""
        return cls(entries={name: PromptEmbedsPayload.from_tensor(tensor) for name, tensor in tensors.items()})

    def to_mapping(self, *, max_elements: int) -> dict[str, torch.Tensor]:
        """The tensors by name; all together have at most `max_elements` elements.

        Raises PayloadError, before any tensor is made, when they are more or when a header is wrong.
        """
        total = sum(entry.count(max_elements=max_elements) for entry in self.entries.values())
        if total > max_elements:
            raise PayloadError(f"The entries hold {total} elements together, but at most {max_elements} are taken.")
        return {name: entry.to_tensor(max_elements=max_elements) for name, entry in self.entries.items()}


@dataclass(frozen=True, slots=True)
class PrefixHashes:
    """Names of a prompt's full blocks of `block_size` positions, the first one first, `HASH_BYTES` each.

    Each says all tokens and media up to its block's end, so that two prompts that share one share all rows up to there.
    """

    block_size: int
    hashes: tuple[bytes, ...]

    def blocks_in(self, positions: int) -> int:
        """How many of the blocks lie before `positions` as a whole."""
        return min(len(self.hashes), positions // self.block_size)

    def up_to(self, positions: int) -> PrefixHashes:
        """Those of the blocks before `positions` alone."""
        return replace(self, hashes=self.hashes[: self.blocks_in(positions)])


Earlier = Callable[[int], AsyncGenerator["torch.Tensor", None]]
"""Gives the rows from a position on that a first chunk left out, up to its start, in parts. RequestGone if they are
lost.
"""


@dataclass(frozen=True, eq=False)
class RowsChunk:
    """Rows of one request on their way from stage to stage.

    `start` is the absolute position of the first row; `rows` is `[n, H]` of an allowed dtype; `positions` is int64
    `[3, P]`, the prompt's M-RoPE positions, and only comes with a request's first chunk, as `prefix` does: that of the
    prompt. A first chunk may start behind blocks of the prompt whose rows were told before, to whoever read an earlier
    request: `earlier` gives them to who has not kept what it made of them. `packed`: see `pack`, where it is known.
    Raises PayloadError when made with anything else.
    """

    start: int
    rows: torch.Tensor
    positions: torch.Tensor | None = None
    packed: torch.Tensor | None = field(default=None, repr=False, compare=False)
    prefix: PrefixHashes | None = None
    earlier: Earlier | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        _name_of(self.rows.dtype)
        if not 0 <= self.start <= _MAX_EXTENT:
            raise PayloadError(f"A chunk's start must be from 0 to {_MAX_EXTENT}.")
        if self.rows.dim() != 2:
            raise PayloadError(f"A chunk's rows have shape {list(self.rows.shape)}, but they must be [n, H].")
        if self.positions is not None:
            _check_positions(self.positions)
        if self.prefix is not None:
            _check_prefix(self.prefix)

    @property
    def end(self) -> int:
        """Absolute position after the last row."""
        return self.start + self.rows.shape[0]

    def after(self, position: int) -> RowsChunk | None:
        """The part from an absolute position on, as a view; None when nothing is left, as for a chunk that came twice.

        A chunk that loses rows also loses its M-RoPE positions: who has those rows got them with the positions.
        """
        if self.end <= position:
            return None
        if position <= self.start:
            return self
        return RowsChunk(position, self.rows[position - self.start :])

    def before(self, position: int) -> RowsChunk | None:
        """The part before an absolute position, as a view; None when nothing is left."""
        if position >= self.end:
            return self
        if position <= self.start:
            return None
        rows = self.rows[: position - self.start]
        return RowsChunk(self.start, rows, self.positions, prefix=self.prefix, earlier=self.earlier)

    def without_facts(self) -> RowsChunk:
        """Without what only a first chunk has: for one that is the first of a request that was begun again."""
        return self if self.positions is None and self.prefix is None else RowsChunk(self.start, self.rows)

    @staticmethod
    def joined(chunks: Sequence[RowsChunk]) -> RowsChunk:
        """One chunk of several that follow each other. Raises PayloadError that names a gap or an overlap."""
        import torch

        if not chunks:
            raise PayloadError("There are no chunks to join; at least one is needed.")
        for before, chunk in pairwise(chunks):
            _check_follows(before, chunk)
        if len(chunks) == 1:
            return chunks[0]
        first = chunks[0]
        rows = torch.cat([chunk.rows for chunk in chunks])
        return RowsChunk(first.start, rows, first.positions, prefix=first.prefix, earlier=first.earlier)

    def pack(self) -> torch.Tensor:
        """Everything but `earlier` as one CPU uint8 tensor `[bytes]`.

        Rows, padding to 8 bytes, positions, hashes, eight int64 of trailer.
        """
        import torch

        if self.packed is not None:
            return self.packed
        trailer = _Trailer.describing(self)
        packed = torch.zeros(trailer.total_bytes, dtype=torch.uint8)
        trailer.rows_in(packed).copy_(self.rows.detach())
        if self.positions is not None:
            trailer.positions_in(packed).copy_(self.positions)
        if self.prefix is not None:
            trailer.hashes_in(packed)[:] = b"".join(self.prefix.hashes)
        trailer.write(packed)
        return packed

    @staticmethod
    def in_array(packed: np.ndarray, *, max_elements: int) -> RowsChunk:
        """See `unpack`."""
        import torch

        return RowsChunk.unpack(torch.from_numpy(packed), max_elements=max_elements)

    @staticmethod
    def unpack(packed: torch.Tensor, *, max_elements: int) -> RowsChunk:
        """The chunk in a packed tensor; rows and positions are views of it (it is copied only if not 8-byte aligned).

        Raises PayloadError when a field of the trailer is not allowed, when rows and positions together have more
        than `max_elements` elements, or when the length is not what the trailer says.
        """
        trailer = _Trailer.read(packed)
        trailer.check(packed.numel(), max_elements)
        aligned = _aligned(packed)
        positions = trailer.positions_in(aligned) if trailer.has_positions else None
        return RowsChunk(trailer.start, trailer.rows_in(aligned), positions, aligned, trailer.prefix_in(aligned))


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A packed chunk that this process's own engine made: which rows are in it, and their bytes `[n, row bytes]`.

    For who looks at every row of every request: nothing is checked, and nothing copied.
    """

    packed: torch.Tensor
    start: int
    raw: np.ndarray

    @classmethod
    def of(cls, packed: torch.Tensor) -> PackedRows:
        whole = packed.numpy()
        _, code, start, count, width, *_ = _Trailer.LAYOUT.unpack_from(whole.data, len(whole) - _Trailer.BYTES)
        row_bytes = width * _CODE_BYTES[code]
        return cls(packed, start, whole[: count * row_bytes].reshape(count, row_bytes))

    @property
    def end(self) -> int:
        return self.start + len(self.raw)

    def after(self, before: Sequence[np.ndarray]) -> torch.Tensor:
        """The packed chunk with the rows of the positions right before its own, as `raw` has them, ahead of these."""
        import torch

        own = _Trailer.read(self.packed)
        num_before = sum(map(len, before))
        trailer = replace(own, start=own.start - num_before, row_count=own.row_count + num_before)
        packed = torch.from_numpy(np.zeros(trailer.total_bytes, np.uint8))
        raw = packed[: trailer.rows_bytes].numpy().reshape(trailer.row_count, self.raw.shape[1])
        np.concatenate([*before, self.raw], out=raw)
        packed[trailer.positions_start : trailer.hashes_end] = self.packed[own.positions_start : own.hashes_end]
        trailer.write(packed)
        return packed


@dataclass(frozen=True)
class _Trailer:
    """The last eight int64 of a packed chunk, and where they say the rows, the positions and the hashes lie."""

    magic: int
    dtype_code: int
    start: int
    row_count: int
    width: int
    position_count: int
    hash_count: int
    block_size: int

    # "OmniRow" and the version of the layout; read with the other byte order it does not match.
    MAGIC = int.from_bytes(b"\x02woRinmO", "big")
    LAYOUT = struct.Struct("=8q")
    BYTES = LAYOUT.size

    @classmethod
    def describing(cls, chunk: RowsChunk) -> _Trailer:
        code = _DTYPE_CODES.index(_name_of(chunk.rows.dtype))
        row_count, width = chunk.rows.shape
        position_count = -1 if chunk.positions is None else chunk.positions.shape[1]
        prefix = chunk.prefix or PrefixHashes(0, ())
        hash_count = -1 if chunk.prefix is None else len(prefix.hashes)
        return cls(cls.MAGIC, code, chunk.start, row_count, width, position_count, hash_count, prefix.block_size)

    @classmethod
    def read(cls, packed: torch.Tensor) -> _Trailer:
        import torch

        if packed.dtype != torch.uint8 or packed.dim() != 1 or packed.device.type != "cpu":
            raise PayloadError(
                f"Packed rows are {_described(packed)}, but they must be one dimension of uint8 on the CPU."
            )
        if packed.numel() < cls.BYTES:
            raise PayloadError(f"Packed rows have {packed.numel()} bytes, but the trailer alone takes {cls.BYTES}.")
        return cls(*cls.LAYOUT.unpack_from(packed.numpy().data, packed.numel() - cls.BYTES))

    def write(self, packed: torch.Tensor) -> None:
        self.LAYOUT.pack_into(packed.numpy().data, packed.numel() - self.BYTES, *astuple(self))

    def check(self, packed_bytes: int, max_elements: int) -> None:
        if self.magic != self.MAGIC:
            raise PayloadError("Packed rows do not end in the mark of this version; both stages must run the same one.")
        if not 0 <= self.dtype_code < len(_DTYPE_CODES):
            raise PayloadError(f"Packed rows have dtype code {self.dtype_code}, which is none of {_known_dtypes()}.")
        if not 0 <= self.start <= _MAX_EXTENT:
            raise PayloadError(f"Packed rows start at {self.start}, but it must be from 0 to {_MAX_EXTENT}.")
        if self.position_count < -1:
            raise PayloadError(f"Packed rows have {self.position_count} positions; -1 is the least, for none.")
        if self.hash_count < -1:
            raise PayloadError(f"Packed rows have {self.hash_count} hashes; -1 is the least, for none.")
        self._check_size(packed_bytes, max_elements)

    def _check_size(self, packed_bytes: int, max_elements: int) -> None:
        elements = _count_elements((self.row_count, self.width), max_elements)
        elements += _count_elements((3, max(self.position_count, 0)), max_elements)
        elements += _count_elements((max(self.hash_count, 0), HASH_BYTES), max_elements)
        if elements > max_elements:
            raise PayloadError(f"Packed rows have {elements} elements, but at most {max_elements} are taken.")
        if packed_bytes != self.total_bytes:
            raise PayloadError(f"Packed rows have {packed_bytes} bytes, but their trailer says {self.total_bytes}.")

    @property
    def has_positions(self) -> bool:
        return self.position_count >= 0

    @property
    def dtype(self) -> torch.dtype:
        return _dtype_named(_DTYPE_CODES[self.dtype_code])

    @property
    def rows_bytes(self) -> int:
        return self.row_count * self.width * ITEM_BYTES[_DTYPE_CODES[self.dtype_code]]

    @property
    def positions_start(self) -> int:
        return -(-self.rows_bytes // 8) * 8

    @property
    def positions_end(self) -> int:
        return self.positions_start + 3 * max(self.position_count, 0) * 8

    @property
    def hashes_end(self) -> int:
        return self.positions_end + HASH_BYTES * max(self.hash_count, 0)

    @property
    def total_bytes(self) -> int:
        return self.hashes_end + self.BYTES

    def rows_in(self, packed: torch.Tensor) -> torch.Tensor:
        return packed[: self.rows_bytes].view(self.dtype).view(self.row_count, self.width)

    def positions_in(self, packed: torch.Tensor) -> torch.Tensor:
        import torch

        raw = packed[self.positions_start : self.positions_end]
        return raw.view(torch.int64).view(3, self.position_count)

    def hashes_in(self, packed: torch.Tensor) -> memoryview:
        return packed.numpy().data[self.positions_end : self.hashes_end]

    def prefix_in(self, packed: torch.Tensor) -> PrefixHashes | None:
        if self.hash_count < 0:
            return None
        raw = bytes(self.hashes_in(packed))
        hashes = (raw[i : i + HASH_BYTES] for i in range(0, len(raw), HASH_BYTES))
        return PrefixHashes(self.block_size, tuple(hashes))


def _aligned(packed: torch.Tensor) -> torch.Tensor:
    whole = packed.contiguous()
    misaligned = whole.data_ptr() % 8 or whole.storage_offset() % 8
    return whole.clone() if misaligned else whole


def _check_follows(before: RowsChunk, chunk: RowsChunk) -> None:
    if chunk.start != before.end:
        fault = "a gap" if chunk.start > before.end else "an overlap"
        raise PayloadError(
            f"There is {fault} between rows that end at {before.end} and rows that start at {chunk.start}."
        )
    if (chunk.rows.dtype, chunk.rows.shape[1]) != (before.rows.dtype, before.rows.shape[1]):
        raise PayloadError(f"Rows of {_described(chunk.rows)} cannot follow rows of {_described(before.rows)}.")
    if chunk.positions is not None:
        raise PayloadError(f"The chunk at {chunk.start} brings positions, but only a request's first chunk may.")
    if chunk.prefix is not None:
        raise PayloadError(f"The chunk at {chunk.start} brings a prompt's hashes, but only a first chunk may.")


def _check_prefix(prefix: PrefixHashes) -> None:
    if not 1 <= prefix.block_size <= _MAX_EXTENT:
        raise PayloadError(f"A prompt's blocks have {prefix.block_size} positions, but they must have 1 at least.")
    if any(len(each) != HASH_BYTES for each in prefix.hashes):
        raise PayloadError(f"A prompt's hashes must have {HASH_BYTES} bytes each.")


def _check_positions(positions: torch.Tensor) -> None:
    import torch

    if positions.dtype != torch.int64 or positions.dim() != 2 or positions.shape[0] != 3:
        raise PayloadError(f"M-RoPE positions are {_described(positions)}, but they must be [3, P] of int64.")


def _check_carried(tensor: torch.Tensor) -> None:
    import torch

    if not 1 <= tensor.dim() <= _MAX_DIMS:
        raise PayloadError(f"The tensor has {tensor.dim()} dimensions, but a payload carries 1 to {_MAX_DIMS}.")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise PayloadError("The tensor has no dense elements of its own; a payload carries dense tensors with data.")


def _count_elements(shape: Sequence[int], max_elements: int) -> int:
    if not 1 <= len(shape) <= _MAX_DIMS:
        raise PayloadError(f"The shape has {len(shape)} dimensions, but 1 to {_MAX_DIMS} are taken.")
    # The values themselves stay out of the sentences: an integer of Python may be too long to print.
    if any(not 0 <= size <= _MAX_EXTENT for size in shape):
        raise PayloadError(f"The shape has a dimension that is negative or above {_MAX_EXTENT}.")
    if math.prod(max(size, 1) for size in shape) > _MAX_EXTENT:
        raise PayloadError(f"The shape {list(shape)} spans more than {_MAX_EXTENT} places.")
    elements = math.prod(shape)
    if elements > max_elements:
        raise PayloadError(f"The shape {list(shape)} has {elements} elements, but at most {max_elements} are taken.")
    return elements


def _item_bytes(name: str) -> int:
    if name not in ITEM_BYTES:
        raise PayloadError(f"The dtype {name[:32]!r} is not carried; use one of {_known_dtypes()}.")
    return ITEM_BYTES[name]


def _dtype_named(name: str) -> torch.dtype:
    """`name`: one that is carried."""
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _name_of(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise PayloadError(f"The dtype {dtype} is not carried; use one of {_known_dtypes()}.")
    return name


def _known_dtypes() -> str:
    return ", ".join(ITEM_BYTES)


def _described(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device.type}"
