"""Frames: what travels on a connection between replicas, a head and some parts of bytes behind it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_HEAD = struct.Struct("<II")
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Frame:
    """`load`: requests that the sender works on. A frame without parts says only that, and that the sender lives."""

    load: int
    parts: Sequence[bytes | bytearray]


def write_frame(writer: asyncio.StreamWriter, parts: Sequence[Any], load: int = 0) -> None:
    """In one piece: several tasks may write frames on one connection."""
    writer.writelines([frame_head(parts, load), *parts])


def frame_head(parts: Sequence[Any], load: int) -> bytes:
    """What goes before the parts: how many there are, what `Frame` says, the bytes of each."""
    head = _HEAD.pack(len(parts), load)
    return head + b"".join(_LENGTH.pack(len(part)) for part in parts)


async def read_frame(reader: asyncio.StreamReader, max_bytes: int, heard: Callable[[], None] = lambda: None) -> Frame:
    """Calls `heard` for whatever comes, a large frame's middle too.

    Raises ConnectionError for a frame above `max_bytes`: it is not what the other end sends.
    """
    count, load = _HEAD.unpack(await _read(reader, _HEAD.size, heard))
    if count * _LENGTH.size > max_bytes:
        raise ConnectionError(f"a frame has {count} parts")
    table = await _read(reader, count * _LENGTH.size, heard)
    lengths = [length for (length,) in _LENGTH.iter_unpack(table)]
    if sum(lengths) > max_bytes:
        raise ConnectionError(f"a frame has {sum(lengths)} bytes, and {max_bytes} are accepted")
    return Frame(load, [await _read(reader, length, heard) for length in lengths])


async def _read(reader: asyncio.StreamReader, size: int, heard: Callable[[], None]) -> bytearray:
    data = bytearray(size)
    filled = 0
    while filled < size:
        piece = await reader.read(size - filled)
        if not piece:
            raise asyncio.IncompleteReadError(bytes(data[:filled][-64:]), size)
        heard()
        data[filled : filled + len(piece)] = piece
        filled += len(piece)
    return data
