"""What replicas read from each other's connections: frames, and the messages in them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from random import Random

import numpy as np

from omni_cluster.cluster.wire import MessageItem, frame_head, packed, read_frame, unpacked
from omni_cluster.types.codes import Codes
from omni_cluster.types.errors import RequestError
from omni_cluster.types.outputs import AudioChunk, HandoverTimes, ImageChunk, StageChunk
from tests.fuzz.mutate import changed_bytes

MAX_FRAME_BYTES = 100_000


@functools.cache
def _parts() -> tuple[bytes, ...]:
    sound = AudioChunk(0, np.ones(4, np.float32), 24_000)
    codes, pictures = Codes.of(2, [[1, 2]]), (ImageChunk(0, b"PNG"),)
    chunk = StageChunk(0, (5, 6), "Hi", audio=sound, handover=HandoverTimes(0.1, 0.2), images=pictures, codes=codes)
    items = [MessageItem(3, chunk, rows_at=2), MessageItem(3, None), MessageItem(4, None, RequestError("no."))]
    return tuple(bytes(part) for part in packed(items))


def _frame(parts: list[bytes]) -> bytes:
    return frame_head(parts, load=3) + b"".join(parts)


def frame(rng: Random) -> bytes:
    """The message changed in a whole frame, or the frame."""
    parts = list(_parts())
    if rng.random() < 0.5:
        parts[0] = changed_bytes(parts[0], rng)
        return _frame(parts[: rng.randint(1, len(parts))])
    return changed_bytes(_frame(parts), rng)


def take_frame(data: bytes) -> None:
    unpacked(asyncio.run(_read(data)))


async def _read(data: bytes) -> Sequence[bytes | bytearray]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return (await read_frame(reader, MAX_FRAME_BYTES))[1]
