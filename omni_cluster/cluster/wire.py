"""What both ends of a connection between replicas speak: a proof, frames, heartbeats, and messages in the frames.

An HMAC challenge-response proves to each end that the other knows the replica's secret, which is never sent. Each end
answers a challenge that the other has just made up, so a handshake that was overheard cannot be repeated.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from omni_cluster.cluster.failures import StageFailed, lost_with
from omni_cluster.types.errors import PayloadError, kind_named, kinds_of
from omni_cluster.types.outputs import StageChunk

_HEAD = struct.Struct("<II")
_LENGTH = struct.Struct("<Q")
_DTYPES = {dtype.str: dtype for dtype in map(np.dtype, ("float32", "uint8", "int16", "int64"))}
"""Of the arrays in a message. NumPy reads more into a name than a message may say."""


def write_frame(writer: asyncio.StreamWriter, parts: Sequence[Any], load: int = 0) -> None:
    """In one piece: several tasks may write frames on one connection. `load`: requests that the sender works on.

    A frame without parts says only that, and that the sender lives.
    """
    writer.writelines([frame_head(parts, load), *parts])


def frame_head(parts: Sequence[Any], load: int) -> bytes:
    """What goes before the parts: how many there are, the load, the bytes of each."""
    head = _HEAD.pack(len(parts), load)
    return head + b"".join(_LENGTH.pack(len(part)) for part in parts)


async def read_frame(
    reader: asyncio.StreamReader, max_bytes: int, heard: Callable[[], None] = lambda: None
) -> tuple[int, list[bytearray]]:
    """Returns the sender's load, and the parts. Calls `heard` for whatever comes, a large frame's middle too.

    Raises ConnectionError for a frame above `max_bytes`: it is not what the other end sends.
    """
    count, load = _HEAD.unpack(await _read(reader, _HEAD.size, heard))
    if count * _LENGTH.size > max_bytes:
        raise ConnectionError(f"a frame has {count} parts")
    table = await _read(reader, count * _LENGTH.size, heard)
    lengths = [length for (length,) in _LENGTH.iter_unpack(table)]
    if sum(lengths) > max_bytes:
        raise ConnectionError(f"a frame has {sum(lengths)} bytes, and {max_bytes} are accepted")
    return load, [await _read(reader, length, heard) for length in lengths]


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


class Subscription(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One reader's wish for all chunks of a request.

    `reader`: a number that the consumer gives each of its own. `rows`: the name of the publisher that the request's
    rows are to go to; None for a reader that wants none. `earlier_from`: in place of the chunks, the rows from this
    position on that the first of them left out. `ends`: nothing more is read, the request has its whole answer.
    """

    reader: int
    request_id: str
    rows: str | None
    earlier_from: int | None = None
    ends: bool = False


class RowsConfirmed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A consumer has the rows of all chunks with numbers before `end`, or does without them."""

    end: int


class MessageItem(msgspec.Struct, frozen=True, array_like=True):
    """What one reader is sent: a chunk, whose rows come as a Ray object; `rows_at` is their number.

    Without a chunk it is the end, with the error if something broke. A struct is made, and written, in a fraction of a
    data class's time, and there are as many of them as tokens.
    """

    reader: int
    chunk: StageChunk | None
    error: Exception | None = None
    rows_at: int | None = None


def packed(message: list[MessageItem]) -> list[Any]:
    """The message's head, and the arrays in it."""
    arrays: list[memoryview] = []

    def reference(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(value.data.cast("B") if value.size else memoryview(b""))
            return len(arrays), value.dtype.str
        if isinstance(value, Exception):
            return kinds_of(value), str(value), getattr(value, "replica_id", "")
        raise NotImplementedError(f"a message cannot hold a {type(value).__name__}")

    head = msgspec.msgpack.encode(message, enc_hook=reference)
    return [head, *arrays]


def unpacked(parts: Sequence[bytes | bytearray]) -> list[MessageItem]:
    """What `packed` was given. Raises PayloadError for what it did not make."""

    def resolve(kind: type, value: Any) -> Any:
        if kind is np.ndarray:
            part, dtype = value
            return np.frombuffer(parts[part], _DTYPES[dtype])
        kinds, said, replica_id = value
        return lost_with((kind_named(kinds) or StageFailed)(said), replica_id)

    try:
        return msgspec.msgpack.decode(parts[0], type=list[MessageItem], dec_hook=resolve)
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError) as error:
        raise PayloadError(f"A message of {len(parts)} parts is not what replicas send: {error}.") from None


GREETING_S = 5.0
"""How long both proofs may take together."""
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size

_READER, _REPLICA = b"reader", b"replica"


async def peer_knows_secret(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> bool:
    """The replica's side. Returns whether the peer proves it in time; only then the replica proves it too."""
    asked = secrets.token_bytes(NONCE_BYTES)
    writer.write(asked)
    try:
        async with asyncio.timeout(GREETING_S):
            answered = await reader.readexactly(NONCE_BYTES + PROOF_BYTES)
    except (asyncio.IncompleteReadError, TimeoutError, ConnectionError):
        return False
    own, proof = answered[:NONCE_BYTES], answered[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, _READER, asked, own)):
        return False
    writer.write(_proof(secret, _REPLICA, asked, own))
    return True


async def prove_secret(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """The reader's side. Raises ConnectionError for an impostor, TimeoutError for a peer that is silent."""
    async with asyncio.timeout(GREETING_S):
        asked = await reader.readexactly(NONCE_BYTES)
        own = secrets.token_bytes(NONCE_BYTES)
        writer.write(own + _proof(secret, _READER, asked, own))
        proof = await reader.readexactly(PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, _REPLICA, asked, own)):
        raise ConnectionError("the peer does not know the replica's secret")


def _proof(secret: bytes, side: bytes, asked: bytes, own: bytes) -> bytes:
    """The proof contains the side, so that a peer cannot send our own proof back to us."""
    return hmac.digest(secret, side + asked + own, "sha256")


BEAT_S = 1.0
"""Each end sends something at least this often."""
MISSED_BEATS = 8
"""After so many beats without anything from the other end, it counts as gone. An event loop that is busy for a few
seconds does not: longer steps would already have stopped every stream."""

# The kernel gives up about as late, for an end whose own event loop is stuck.
_OPTIONS = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 9000}


class Heartbeat:
    """One end of a connection. It counts its own beats, not seconds: one that was frozen does not blame the other."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._missed = 0
        self.is_lost = False
        keep_alive(writer.get_extra_info("socket"))

    def heard(self) -> None:
        """Something came from the other end."""
        self._missed = 0

    async def keep(self, beat: Callable[[], None]) -> None:
        """Calls `beat` once a beat; cuts the connection, and returns, when the other end has been silent too long."""
        while self._missed < MISSED_BEATS:
            await asyncio.sleep(BEAT_S)
            self._missed += 1
            beat()
        self.is_lost = True
        self._writer.transport.abort()  # close() would wait until all that was written has arrived


def keep_alive(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if hasattr(socket, name):  # not every system has all of them
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
