"""Conditioning rows in the one form in which they travel from worker to worker.

Packed rows are a header and the bytes behind it: rows, and with a request's first rows the prompt's positions and the
names of its blocks. What is between two workers cuts and joins them by position, and never unpacks them. Every header
is checked before memory is taken, and nothing here is ever unpickled or given to `torch.load`.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from omni_cluster.types.errors import PayloadError

if TYPE_CHECKING:  # a process that computes nothing starts without torch: the functions import it
    import torch

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1, "int16": 2}
)
"""The dtypes that are carried, by torch's names for them."""

HASH_BYTES = 32
"""Of the hash of a block: SHA-256, vLLM's default."""

LARGE_BYTES = 1 << 20
"""What has so many bytes is not joined with what follows it: that would be a copy of milliseconds."""

KIND_BYTES = 16
"""The longest name of a kind of rows, in ASCII."""

RESIDUAL_CODES = "residual codes"
"""The kind of rows that are codes of the tokens at their places in a request's output, int16 `[n, Q - 1]`."""

IDS = "ids"
"""The kind of rows that are ids of a table of the model's, int32 `[n, 1]`. Rows and ids may follow each other."""

NO_ID = -1
"""Of a position that has no id."""

# Rows carry their dtype as a number: the place in this tuple is part of the wire format, so only append.
_DTYPE_CODES = tuple(ITEM_BYTES)
# A zero among the dims hides the others from the element count.
_MAX_EXTENT = 2**40

# Packed rows are read where they lie; nothing here writes to them.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


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


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one request, `[n, H]`, at the positions from `start` on.

    `kind`: the family's name of what they are. `dtype`: a key of `ITEM_BYTES`. `raw`: uint8 `[n, bytes of a row]`, as
    the host orders bytes. `mask` bool `[positions]`: which of the positions from `start` on have a row; None: all
    that there are rows for. `positions` int64 `[3, P]`, M-RoPE positions of the prompt, and `prefix`, the names of its
    blocks, come with a request's first rows alone. First rows may begin behind blocks that went out with an earlier
    prompt: `earlier` gives the rows of these; it does not travel. `packed`: see `pack`, where it is known.
    Raises PayloadError when made with anything else.
    """

    kind: str
    dtype: str
    start: int
    raw: np.ndarray
    positions: np.ndarray | None = None
    prefix: PrefixHashes | None = None
    earlier: Earlier | None = field(default=None, repr=False)
    packed: np.ndarray | None = field(default=None, repr=False)
    mask: np.ndarray | None = None

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        _check_start(self.start)
        if self.raw.dtype != np.uint8 or self.raw.ndim != 2 or self.raw.shape[1] % _item_bytes(self.dtype):
            raise PayloadError(
                f"Hidden states of {self.dtype} have bytes of shape {list(self.raw.shape)}, which are none."
            )
        if self.kind == IDS and (self.dtype, self.raw.shape[1]) != ("int32", ITEM_BYTES["int32"]):
            raise PayloadError(f"Ids are {_form(self)}, but they must be [n, 1] of int32.")
        if self.positions is not None and (self.positions.dtype != np.int64 or self.positions.shape[:-1] != (3,)):
            raise PayloadError(f"M-RoPE positions are {_described(self.positions)}, but they must be [3, P] of int64.")
        if self.prefix is not None:
            _check_prefix(self.prefix)
        if self.mask is not None and int(self.mask.sum()) != len(self.raw):
            raise PayloadError(
                f"There are {len(self.raw)} hidden states, but a mask of {int(self.mask.sum())} positions."
            )

    @classmethod
    def of(
        cls,
        kind: str,
        start: int,
        rows: torch.Tensor,
        positions: np.ndarray | None = None,
        prefix: PrefixHashes | None = None,
        mask: np.ndarray | None = None,
    ) -> Rows:
        """Of a tensor `[n, H]`, whose memory they share if it is contiguous and on the CPU."""
        import torch

        if rows.dim() != 2:
            raise PayloadError(f"Hidden states have shape {list(rows.shape)}, but they must be [n, H].")
        dtype = str(rows.dtype).removeprefix("torch.")
        _item_bytes(dtype)
        # numpy knows no bfloat16, so every dtype leaves torch as bytes.
        raw = rows.detach().cpu().contiguous().view(torch.uint8)
        return cls(kind, dtype, start, raw.numpy(), positions, prefix, mask=mask)

    @classmethod
    def of_ids(cls, start: int, ids: Sequence[int], positions: np.ndarray | None = None) -> Rows:
        """Of ids in place of rows; `NO_ID` for a position without one."""
        return cls(IDS, "int32", start, np.array(ids, np.int32).view(np.uint8).reshape(-1, 4), positions)

    def tensor(self) -> torch.Tensor:
        """The rows as a tensor `[n, H]` on the CPU, a view that is not to be written to."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        raw = torch.from_numpy(self.raw.reshape(-1))
        aligned = raw.clone() if raw.data_ptr() % ITEM_BYTES[self.dtype] else raw
        return aligned.view(dtype).view(len(self.raw), self.width)

    @property
    def width(self) -> int:
        return self.raw.shape[1] // ITEM_BYTES[self.dtype]

    @property
    def end(self) -> int:
        """Absolute position after the last one."""
        return self.start + len(self.raw if self.mask is None else self.mask)

    @property
    def at(self) -> np.ndarray:
        """The absolute position of each row, int64 `[n]`."""
        return self.start + (np.arange(len(self.raw)) if self.mask is None else np.flatnonzero(self.mask))

    @property
    def num_elements(self) -> int:
        """Of rows, positions, hashes and mask together, as `max_elements` counts them."""
        facts = sum(part.size for part in (self.positions, self.mask) if part is not None)
        return len(self.raw) * self.width + facts + (len(self.prefix.hashes) * HASH_BYTES if self.prefix else 0)

    def after(self, position: int) -> Rows | None:
        """The part from an absolute position on, as a view; None when nothing is left, as for rows that came twice.

        Rows that lose their first ones also lose what came with these: positions, and names of blocks.
        """
        if self.end <= position:
            return None
        if position <= self.start:
            return self
        first, mask = position - self.start, self.mask
        rest = None if mask is None else mask[first:]
        return Rows(self.kind, self.dtype, position, self.raw[_row_number(first, mask) :], mask=rest)

    def before(self, position: int) -> Rows | None:
        """The part before an absolute position, as a view; None when nothing is left."""
        if position >= self.end:
            return self
        if position <= self.start:
            return None
        end, mask = position - self.start, self.mask
        part = None if mask is None else mask[:end]
        return replace(self, raw=self.raw[: _row_number(end, mask)], mask=part, packed=None)

    def moved(self, positions: int) -> Rows:
        """The same rows so many positions further on."""
        return replace(self, start=self.start + positions, packed=None)

    def preceded_by(self, before: Sequence[np.ndarray], mask: np.ndarray | None = None) -> Rows:
        """With the rows of the positions right before its own, as `raw` and `mask` have them, ahead of these."""
        start = self.start - (sum(map(len, before)) if mask is None else len(mask))
        return self._with(start, [*before, self.raw], _joined_mask([(self.start - start, mask), self._masked]))

    def without_facts(self) -> Rows:
        """Without what only first rows have: for those that are the first of a request that was begun again."""
        if self.positions is None and self.prefix is None:
            return self
        return Rows(self.kind, self.dtype, self.start, self.raw, mask=self.mask)

    @property
    def _masked(self) -> _Masked:
        return self.end - self.start, self.mask

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """Rows of several that follow each other. Raises PayloadError that names a gap or an overlap."""
        if not parts:
            raise PayloadError("There are no hidden states to join; at least one part is needed.")
        for before, part in pairwise(parts):
            _check_follows(before, part)
        if len(parts) == 1:
            return parts[0]
        mask = _joined_mask([part._masked for part in parts])
        return parts[0]._with(parts[0].start, [part.raw for part in parts], mask)

    def pack(self) -> np.ndarray:
        """Everything but `earlier` as bytes, uint8: header, rows, padding to 8 bytes, positions, hashes, mask."""
        if self.packed is not None:
            return self.packed
        return np.frombuffer(bytearray().join(self._parts(self.start, [self.raw], self.mask)), np.uint8)

    def to_bytes(self) -> bytes:
        """As `pack`."""
        if self.packed is not None:
            return self.packed.tobytes()
        return b"".join(self._parts(self.start, [self.raw], self.mask))

    def _with(self, start: int, raws: Sequence[np.ndarray], mask: np.ndarray | None) -> Rows:
        """Packed, with these rows in place of its own: one copy."""
        packed = np.frombuffer(bytearray().join(self._parts(start, raws, mask)), np.uint8)
        return replace(self, start=start, raw=_Header.read(packed).rows_in(packed), packed=packed, mask=mask)

    def _parts(self, start: int, raws: Sequence[np.ndarray], mask: np.ndarray | None) -> list[Any]:
        """What packed rows are made of, each with a buffer."""
        prefix = self.prefix or PrefixHashes(0, ())
        count = sum(map(len, raws))
        header = _Header(
            self.kind,
            self.dtype,
            start,
            count,
            self.width,
            -1 if self.positions is None else self.positions.shape[1],
            -1 if self.prefix is None else len(prefix.hashes),
            prefix.block_size,
            -1 if mask is None else len(mask),
        )
        positions = [] if self.positions is None else [np.ascontiguousarray(self.positions)]
        padding = bytes(-count * self.raw.shape[1] % 8)
        masks = [] if mask is None else [np.ascontiguousarray(mask)]
        return [header.pack(), *map(np.ascontiguousarray, raws), padding, *positions, *prefix.hashes, *masks]

    @staticmethod
    def unpack(packed: np.ndarray | bytes, *, max_elements: int | None) -> Rows:
        """The rows in packed bytes, as views.

        Raises PayloadError when a field of the header is not allowed, when rows, positions, hashes and mask together
        have more than `max_elements` elements, or when the length is not what the header says. `max_elements`: None for
        rows that this process made.
        """
        whole = np.frombuffer(packed, np.uint8) if isinstance(packed, bytes) else np.ascontiguousarray(packed)
        header = _Header.read(whole)
        header.check_size(len(whole), max_elements)
        return Rows(
            header.kind,
            header.dtype,
            header.start,
            header.rows_in(whole),
            header.positions_in(whole),
            header.prefix_in(whole),
            packed=whole,
            mask=header.mask_in(whole),
        )


Earlier = Callable[[int], AsyncGenerator[Rows, None]]
"""Gives the rows from a position on that a request's first ones left out, in parts. RequestGone if they are lost."""


def check_together(parts: Sequence[Rows], max_elements: int) -> None:
    """Raises PayloadError for parts that lack rows, do not follow each other, or have more elements together."""
    for part in parts:
        check_lacks_none(part)
    width = width_of(parts)
    for before, part in pairwise(parts):
        check_next(part, before.end, width)
    elements = sum(part.num_elements for part in parts)
    if elements > max_elements:
        raise PayloadError(f"Hidden states have {elements} elements together, but at most {max_elements} are taken.")


def check_lacks_none(rows: Rows) -> None:
    """Raises PayloadError for rows of some positions alone, or of no elements, which no engine can add to its own."""
    if rows.mask is not None:
        raise PayloadError(
            f"Hidden states from {rows.start} to {rows.end} are of some positions alone; an engine takes all."
        )
    if not rows.width:
        raise PayloadError(f"Hidden states have shape {[len(rows.raw), 0]}, but each has one element or more.")


def width_of(parts: Sequence[Rows]) -> int:
    """Of their rows, as the first part says it; 0 where all of them are ids."""
    return next((part.width for part in parts if part.kind != IDS), 0)


def check_next(rows: Rows, end: int, width: int) -> None:
    """Raises PayloadError for rows that cannot follow those of `width` elements that end at `end`; see `width_of`."""
    if rows.start != end:
        fault = "a gap" if rows.start > end else "an overlap"
        raise PayloadError(
            f"There is {fault} between hidden states that end at {end} and those that start at {rows.start}."
        )
    if rows.kind != IDS and width not in (0, rows.width):
        raise PayloadError(
            f"Hidden states have shape {[len(rows.raw), rows.width]}, but those before them are [n, {width}]."
        )


class _Header(NamedTuple):
    """The first bytes of packed rows, and where they say that the rows, the positions and the hashes lie."""

    kind: str
    dtype: str
    start: int
    row_count: int
    width: int
    position_count: int
    hash_count: int
    block_size: int
    mask_count: int

    def pack(self) -> bytes:
        kind, code = self.kind.encode().ljust(KIND_BYTES, b"\0"), _DTYPE_CODES.index(self.dtype)
        return HEADER.pack(MAGIC, kind, code, *self[2:])

    @classmethod
    def read(cls, packed: np.ndarray) -> _Header:
        if packed.dtype != np.uint8 or packed.ndim != 1:
            raise PayloadError(f"Packed states are {_described(packed)}, but they must be one dimension of uint8.")
        if len(packed) < HEADER.size:
            raise PayloadError(f"Packed states have {len(packed)} bytes, but the header alone takes {HEADER.size}.")
        magic, kind, code, start, *numbers = HEADER.unpack_from(packed.data)
        if magic != MAGIC:
            raise PayloadError(
                "Packed states do not begin with the mark of this version; both stages must run the same one."
            )
        if not 0 <= code < len(_DTYPE_CODES):
            raise PayloadError(f"Packed states have dtype code {code}, which is none of {_known_dtypes()}.")
        return cls(kind.rstrip(b"\0").decode("ascii", "replace"), _DTYPE_CODES[code], start, *numbers)

    def check_size(self, packed_bytes: int, max_elements: int | None) -> None:
        if self.position_count < -1:
            raise PayloadError(f"Packed states have {self.position_count} positions; -1 is the least, for none.")
        if self.hash_count < -1:
            raise PayloadError(f"Packed states have {self.hash_count} hashes; -1 is the least, for none.")
        if self.mask_count < -1:
            raise PayloadError(f"Packed states have a mask of {self.mask_count} positions; -1 is the least, for none.")
        elements = _count_elements(self.row_count, self.width)
        elements += _count_elements(3, self.position_count) if self.position_count > 0 else 0
        elements += _count_elements(self.hash_count, HASH_BYTES) if self.hash_count > 0 else 0
        elements += _count_elements(1, self.mask_count) if self.mask_count > 0 else 0
        if max_elements is not None and elements > max_elements:
            raise PayloadError(f"Packed states have {elements} elements, but at most {max_elements} are taken.")
        if packed_bytes != self.mask_end:
            raise PayloadError(f"Packed states have {packed_bytes} bytes, but their header says {self.mask_end}.")

    @property
    def rows_end(self) -> int:
        return HEADER.size + self.row_count * self.width * ITEM_BYTES[self.dtype]

    @property
    def positions_start(self) -> int:
        return -(-self.rows_end // 8) * 8

    @property
    def positions_end(self) -> int:
        return self.positions_start + 3 * max(self.position_count, 0) * 8

    @property
    def hashes_end(self) -> int:
        return self.positions_end + HASH_BYTES * max(self.hash_count, 0)

    @property
    def mask_end(self) -> int:
        return self.hashes_end + max(self.mask_count, 0)

    def rows_in(self, packed: np.ndarray) -> np.ndarray:
        row_bytes = self.width * ITEM_BYTES[self.dtype]
        return packed[HEADER.size : self.rows_end].reshape(self.row_count, row_bytes)

    def positions_in(self, packed: np.ndarray) -> np.ndarray | None:
        if self.position_count < 0:
            return None
        raw = packed[self.positions_start : self.positions_end]
        positions = raw.view(np.int64).reshape(3, self.position_count)
        return positions if positions.flags.aligned else positions.copy()

    def prefix_in(self, packed: np.ndarray) -> PrefixHashes | None:
        if self.hash_count < 0:
            return None
        raw = packed[self.positions_end : self.hashes_end].tobytes()
        hashes = (raw[i : i + HASH_BYTES] for i in range(0, len(raw), HASH_BYTES))
        return PrefixHashes(self.block_size, tuple(hashes))

    def mask_in(self, packed: np.ndarray) -> np.ndarray | None:
        if self.mask_count < 0:
            return None
        raw = packed[self.hashes_end : self.mask_end]
        if raw.max(initial=0) > 1:
            raise PayloadError(f"Packed states have a mask with {raw.max()} in it; it has 0 and 1 alone.")
        return raw.view(np.bool_)


# The version of the layout is the last byte. The rows behind the header are aligned.
MAGIC = b"OmniRow\x04"
HEADER = struct.Struct(f"=8s{KIND_BYTES}s8q")

_Masked = tuple[int, np.ndarray | None]
"""Positions, and which of them have rows; None: all."""


def _row_number(position: int, mask: np.ndarray | None) -> int:
    """How many rows there are before a position that is counted from the first one."""
    return position if mask is None else int(mask[:position].sum())


def _joined_mask(parts: Sequence[_Masked]) -> np.ndarray | None:
    if all(mask is None for _, mask in parts):
        return None
    return np.concatenate([np.ones(count, np.bool_) if mask is None else mask for count, mask in parts])


def _check_follows(before: Rows, part: Rows) -> None:
    check_next(part, before.end, width_of([before]))
    if (part.kind, part.dtype, part.width) != (before.kind, before.dtype, before.width):
        raise PayloadError(f"Hidden states of {_form(part)} cannot follow those of {_form(before)}.")
    if part.positions is not None:
        raise PayloadError(f"The hidden states at {part.start} bring positions, but only a request's first ones may.")
    if part.prefix is not None:
        raise PayloadError(
            f"The hidden states at {part.start} bring a prompt's hashes, but only a request's first ones may."
        )


def _check_kind(kind: str) -> None:
    if not (0 < len(kind) <= KIND_BYTES and kind.isascii() and kind.isprintable()):
        raise PayloadError(
            f"The kind of hidden states is {kind[:KIND_BYTES]!r}; it must be 1 to {KIND_BYTES} letters of ASCII."
        )


def _check_start(start: int) -> None:
    if not 0 <= start <= _MAX_EXTENT:
        raise PayloadError(f"Hidden states start at {start}, but it must be from 0 to {_MAX_EXTENT}.")


def _check_prefix(prefix: PrefixHashes) -> None:
    if not 1 <= prefix.block_size <= _MAX_EXTENT:
        raise PayloadError(f"A prompt's blocks have {prefix.block_size} positions, but they must have 1 at least.")
    if any(len(each) != HASH_BYTES for each in prefix.hashes):
        raise PayloadError(f"A prompt's hashes must have {HASH_BYTES} bytes each.")


def _count_elements(count: int, width: int) -> int:
    if not (0 <= count <= _MAX_EXTENT and 0 <= width <= _MAX_EXTENT):
        raise PayloadError(f"The shape {[count, width]} has a dimension that is negative or above {_MAX_EXTENT}.")
    if max(count, 1) * max(width, 1) > _MAX_EXTENT:
        raise PayloadError(f"The shape {[count, width]} spans more than {_MAX_EXTENT} positions.")
    return count * width


def _item_bytes(name: str) -> int:
    if name not in ITEM_BYTES:
        raise PayloadError(f"The dtype {name[:32]!r} is not carried; use one of {_known_dtypes()}.")
    return ITEM_BYTES[name]


def _known_dtypes() -> str:
    return ", ".join(ITEM_BYTES)


def _form(rows: Rows) -> str:
    return f"{rows.kind!r}, {[len(rows.raw), rows.width]} of {rows.dtype}"


def _described(array: np.ndarray) -> str:
    return f"{list(array.shape)} of {array.dtype}"
