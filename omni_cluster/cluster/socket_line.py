"""A link's messages on a connection of its own, from replica to replica.

A call of Serve's takes milliseconds to begin and as long again for a megabyte, whatever its transport. Ray says where a
replica listens, and the word that opens the connection: only who can call replicas can read from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import struct
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np

from omni_cluster.cluster.line import ServeLine
from omni_cluster.cluster.link import Links
from omni_cluster.cluster.outlet import Outlet, StageFailed
from omni_cluster.cluster.transport import LinkItem, RemoteStage, ReplicaLost, Subscription
from omni_cluster.engine.outbox import Outboxes
from omni_cluster.errors import OmniError, PayloadError

MAX_ITEM_BYTES = 16 << 20
"""Rows of one item, and of one message; more are a Ray object, so that nobody waits long behind a long prompt."""
MAX_FRAME_BYTES = 64 << 20
"""What a reader accepts: a message's rows, and all that is around them."""
MAX_REQUEST_BYTES = 4096
"""Of what a reader sends."""
GREETING_S = 5.0
"""How long a new connection may take to say the word."""
SECRET_BYTES = 32

_LENGTH = struct.Struct("<Q")
_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a replica listens. `secret`: what a connection begins with."""

    host: str
    port: int
    secret: bytes = field(repr=False)


class SocketServer:
    """The producing end: an `Outlet` for each connection."""

    def __init__(self, outboxes: Outboxes, host: str) -> None:
        self._outboxes = outboxes
        self._host = host
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._starting = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def address(self) -> Address:
        """Listens from the first call on."""
        async with self._starting:
            if self._server is None:
                self._server = await asyncio.start_server(self._accept, self._host, 0)
        return Address(self._host, self._server.sockets[0].getsockname()[1], self._secret)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = cast("asyncio.Task[None]", asyncio.current_task())
        self._connections[connection] = writer
        try:
            if await self._knows_the_word(reader):
                await self._serve(reader, writer)
        finally:
            del self._connections[connection]
            writer.close()

    async def _knows_the_word(self, reader: asyncio.StreamReader) -> bool:
        try:
            word = await asyncio.wait_for(reader.readexactly(SECRET_BYTES), GREETING_S)
        except (asyncio.IncompleteReadError, asyncio.TimeoutError, ConnectionError):
            return False
        return hmac.compare_digest(word, self._secret)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until one of both sides ends: the reader leaves, or what is sent to it no longer arrives."""
        outlet = Outlet(self._outboxes, MAX_ITEM_BYTES, idle_s=None)
        sides = [
            asyncio.create_task(self._take_subscriptions(reader, outlet)),
            asyncio.create_task(self._send_messages(writer, outlet)),
        ]
        try:
            await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)

    async def _take_subscriptions(self, reader: asyncio.StreamReader, outlet: Outlet) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (request,) = await _read_frame(reader, MAX_REQUEST_BYTES)
                outlet.subscribe(msgspec.msgpack.decode(request, type=Subscription))

    async def _send_messages(self, writer: asyncio.StreamWriter, outlet: Outlet) -> None:
        with contextlib.suppress(ConnectionError):
            async with contextlib.aclosing(outlet.messages()) as messages:
                async for message in messages:
                    _write_frame(writer, packed(message))
                    await writer.drain()

    def __len__(self) -> int:
        return len(self._connections)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        connections = list(self._connections)
        for writer in self._connections.values():
            writer.close()  # which ends both sides; asyncio reports a connection's task that was cancelled as an error
        await asyncio.gather(*connections)


class SocketLine:
    """The consuming end."""

    def __init__(self, source: RemoteStage, replica_id: str) -> None:
        self._source = source
        self._replica_id = replica_id
        self._writer: asyncio.StreamWriter | None = None

    async def messages(self, first: Subscription) -> AsyncGenerator[list[LinkItem], None]:
        """See `Line.messages`. Raises ReplicaLost when the connection breaks."""
        address: Address = await self._source.call("address", replica_id=self._replica_id)
        try:
            reader, self._writer = await asyncio.open_connection(address.host, address.port, limit=MAX_ITEM_BYTES)
            self._writer.write(address.secret)
            self._ask_for(self._writer, first)
            while True:
                yield unpacked(await _read_frame(reader, MAX_FRAME_BYTES))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ReplicaLost(f"the connection to replica {self._replica_id} broke: {error}") from error
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    async def subscribe(self, subscription: Subscription) -> bool:
        if self._writer is None or self._writer.is_closing():
            return False
        self._ask_for(self._writer, subscription)
        await self._writer.drain()
        return True

    def _ask_for(self, writer: asyncio.StreamWriter, subscription: Subscription) -> None:
        _write_frame(writer, [msgspec.msgpack.encode(subscription)])


def packed(message: list[LinkItem]) -> list[Any]:
    """The message and, each by itself and not copied, the arrays in it."""
    arrays: list[memoryview] = []

    def reference(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(value.data.cast("B") if value.size else memoryview(b""))
            return len(arrays), value.dtype.str
        if isinstance(value, Exception):
            return type(value).__name__, str(value)
        raise NotImplementedError(f"a message cannot hold a {type(value).__name__}")

    head = msgspec.msgpack.encode(message, enc_hook=reference)
    return [head, *arrays]


def unpacked(parts: Sequence[bytes]) -> list[LinkItem]:
    """What `packed` was given. Raises PayloadError for what it did not make."""

    def resolve(kind: type, value: Any) -> Any:
        if kind is np.ndarray:
            part, dtype = value
            return np.frombuffer(parts[part], dtype)
        return error_named(*value)

    try:
        return msgspec.msgpack.decode(parts[0], type=list[LinkItem], dec_hook=resolve)
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError) as error:
        raise PayloadError(f"A message of {len(parts)} parts is not what replicas send: {error}.") from None


def error_named(name: str, message: str) -> Exception:
    """The error of ours with that name, which are all made of one sentence; else what a stage's failure is."""
    return next((kind for kind in _kinds(OmniError) if kind.__name__ == name), StageFailed)(message)


def _kinds(base: type[OmniError]) -> Iterator[type[OmniError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


def _write_frame(writer: asyncio.StreamWriter, parts: Sequence[Any]) -> None:
    lengths = b"".join(_LENGTH.pack(len(part)) for part in parts)
    writer.writelines([_COUNT.pack(len(parts)) + lengths, *parts])


async def _read_frame(reader: asyncio.StreamReader, max_bytes: int) -> list[bytes]:
    """A frame's parts. ConnectionError for a frame above `max_bytes`: it is not what the other end sends."""
    (count,) = _COUNT.unpack(await reader.readexactly(_COUNT.size))
    if count * _LENGTH.size > max_bytes:
        raise ConnectionError(f"a frame has {count} parts")
    table = await reader.readexactly(count * _LENGTH.size)
    lengths = [length for (length,) in _LENGTH.iter_unpack(table)]
    if sum(lengths) > max_bytes:
        raise ConnectionError(f"a frame has {sum(lengths)} bytes, and {max_bytes} are accepted")
    return [await reader.readexactly(length) for length in lengths]


def links_to(source: RemoteStage, max_elements: int) -> Links:
    """Links over lines of the stage's transport."""
    return Links(source, max_elements, SocketLine if source.transport == "socket" else ServeLine)
