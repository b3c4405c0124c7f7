"""Messages with arrays between two processes of a host: a file in memory that neither can change any more.

A file is the length of its head, the head in MessagePack, and the arrays, which are read in place. The reader trusts
nothing: it checks types, shapes and lengths, and a sealed file can be neither cut off nor rewritten meanwhile.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, Final, get_origin

import msgspec
import numpy as np
from pydantic import BaseModel

_LENGTH_BYTES: Final = 8
_ALIGNED_BYTES: Final = 64
_MAX_DIMS: Final = 4
_DTYPES: Final = ("uint8", "float32")
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class ParcelError(Exception):
    """A parcel that is not what its reader expects, or larger than its writer may make it."""


class Parcel:
    """Owns a sealed file in memory; it is gone with the last descriptor and mapping of it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @property
    def size_bytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    def close(self) -> None:
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class _Place(msgspec.Struct, frozen=True):
    """Where an array is, counted from the first of them."""

    dtype: str
    shape: tuple[int, ...]
    start_bytes: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def packed(message: Any, max_bytes: int) -> Parcel:
    """A parcel of what msgspec and pydantic know, and arrays. ParcelError for more than `max_bytes`."""
    arrays: list[tuple[int, np.ndarray]] = []
    end_bytes = 0

    def placed(value: Any) -> Any:
        nonlocal end_bytes
        if isinstance(value, BaseModel):
            return value.model_dump()
        if not isinstance(value, np.ndarray):
            raise NotImplementedError(type(value).__name__)
        array = np.ascontiguousarray(value)
        place = _Place(array.dtype.name, array.shape, end_bytes)
        arrays.append((end_bytes, array))
        end_bytes = _aligned(end_bytes + array.nbytes)
        return place

    head = msgspec.msgpack.encode(message, enc_hook=placed)
    first_bytes = _aligned(_LENGTH_BYTES + len(head))
    if first_bytes + end_bytes > max_bytes:
        raise ParcelError(f"a message of {first_bytes + end_bytes} bytes, but at most {max_bytes} are accepted")
    parcel = Parcel(os.memfd_create("parcel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.ftruncate(parcel.descriptor, first_bytes + end_bytes)
    _write(parcel.descriptor, len(head).to_bytes(_LENGTH_BYTES, "little") + head, 0)
    for start_bytes, array in arrays:
        _write(parcel.descriptor, array.reshape(-1).view(np.uint8).data, first_bytes + start_bytes)
    fcntl.fcntl(parcel.descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return parcel


def unpacked(parcel: Parcel, kind: Any, max_bytes: int, counts: Callable[[int], None] | None = None) -> Any:
    """The message, its arrays read-only and in place. Raises ParcelError. Closes the parcel.

    `counts` is called with the parcel's bytes, and, in whichever thread lets go of the last array, with minus as many.
    """
    try:
        file = _mapped(parcel, max_bytes)
        if counts is not None:
            counts(len(file))
            weakref.finalize(file, counts, -len(file)).atexit = False
        return _unpacked(file, kind)
    except (msgspec.MsgspecError, OSError, ValueError, OverflowError) as error:
        raise ParcelError(f"no message of {kind}: {error}") from None
    finally:
        parcel.close()


def _mapped(parcel: Parcel, max_bytes: int) -> mmap.mmap:
    if fcntl.fcntl(parcel.descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ParcelError("a message in memory that is not sealed")
    size_bytes = parcel.size_bytes
    if not _LENGTH_BYTES <= size_bytes <= max_bytes:
        raise ParcelError(f"a message of {size_bytes} bytes, but {_LENGTH_BYTES} to {max_bytes} are accepted")
    return mmap.mmap(parcel.descriptor, size_bytes, prot=mmap.PROT_READ)


def _unpacked(file: mmap.mmap, kind: Any) -> Any:
    head_bytes = int.from_bytes(file[:_LENGTH_BYTES], "little")
    first_bytes = _aligned(_LENGTH_BYTES + head_bytes)
    if first_bytes > len(file):
        raise ParcelError(f"a head of {head_bytes} bytes in {len(file)}")

    def found(kind: type[Any], value: Any) -> Any:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind.model_validate(value)
        if (get_origin(kind) or kind) is not np.ndarray:
            raise NotImplementedError(kind)
        return _array(file, first_bytes, msgspec.convert(value, _Place))

    head = memoryview(file)[_LENGTH_BYTES : _LENGTH_BYTES + head_bytes]
    return msgspec.msgpack.decode(head, type=kind, dec_hook=found)


def _array(file: mmap.mmap, first_bytes: int, place: _Place) -> np.ndarray:
    if place.dtype not in _DTYPES or len(place.shape) > _MAX_DIMS or min((*place.shape, place.start_bytes)) < 0:
        raise ParcelError(f"an array of {place}")
    if first_bytes + place.start_bytes + place.size_bytes > len(file):
        raise ParcelError(f"an array that ends after its message: {place}")
    count = math.prod(place.shape)
    return np.frombuffer(file, place.dtype, count, first_bytes + place.start_bytes).reshape(place.shape)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _write(descriptor: int, data: bytes | memoryview, at_bytes: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, at_bytes)
        rest, at_bytes = rest[written:], at_bytes + written
