"""The producing end of the connections that other replicas read from."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from omni_cluster.cluster.message_publisher import MessagePublisher
from omni_cluster.cluster.row_objects import RowsPublishers
from omni_cluster.cluster.wire import (
    Heartbeat,
    RowsConfirmed,
    Subscription,
    packed,
    peer_knows_secret,
    read_frame,
    write_frame,
)
from omni_cluster.engine.output_log import OutputLogs

logger = logging.getLogger("ray.serve")

MAX_ITEM_BYTES = 16 << 20
"""Rows and sound of one item, and of one message: bounds how long a reader waits for another's."""
MAX_REQUEST_BYTES = 4096
"""The most that a reader may send in one frame."""
MAX_STRANGERS = 16
"""Connections that have not proved the secret yet. One more ends the oldest: a replica's proof takes milliseconds."""
REPORT_S = 0.1
"""How often readers are sent a new load of this replica."""
SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Address:
    """Where a replica listens. `secret`: what both ends of a connection prove to know."""

    host: str
    port: int
    secret: bytes = field(repr=False)


class Connection:
    """The connection to one reader. Every frame to it carries the replica's load as it is then.

    A process that has read a request's end so knows that the replica no longer works on it.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        publisher: MessagePublisher,
        load: Callable[[], int],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._publisher = publisher
        self._load = load
        self._sent_load = load()
        self._heartbeat = Heartbeat(writer)

    async def serve(self) -> None:
        """Runs until the reader leaves or falls silent, or what is sent to it no longer arrives."""
        sides = [
            asyncio.create_task(self._take_words()),
            asyncio.create_task(self._send_messages()),
            asyncio.create_task(self._heartbeat.keep(self._beat)),
        ]
        try:
            await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
            if self._heartbeat.is_lost:
                self._publisher.abandon()
        finally:
            for side in sides:
                side.cancel()
            for ended in await asyncio.gather(*sides, return_exceptions=True):
                if isinstance(ended, Exception):
                    logger.error("a connection ended, and its readers with it", exc_info=ended)

    def report(self) -> None:
        """Sends the load if it has changed."""
        if self._load() != self._sent_load:
            self._beat()

    def _beat(self) -> None:
        if not self._writer.is_closing():
            self._write([])

    def _write(self, parts: Sequence[Any]) -> None:
        self._sent_load = self._load()
        write_frame(self._writer, parts, self._sent_load)

    async def _take_words(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
            while True:
                _, parts = await read_frame(self._reader, MAX_REQUEST_BYTES, self._heartbeat.heard)
                for said in parts:
                    self._publisher.take(msgspec.msgpack.decode(said, type=Subscription | RowsConfirmed))

    async def _send_messages(self) -> None:
        with contextlib.suppress(ConnectionError):
            async with contextlib.aclosing(self._publisher.messages()) as messages:
                async for message in messages:
                    self._write(packed(message))
                    await self._writer.drain()


class SocketServer:
    """Runs a `MessagePublisher` for each connection. `rows_publishers` have the rows."""

    def __init__(self, logs: OutputLogs, host: str) -> None:
        self.rows_publishers = RowsPublishers(logs.room)
        self.rows_sent_bytes = Counter(as_objects=0, asked=0)
        """Packed rows so far; `asked`: those of earlier prompts, left out at first, for consumers that lacked them."""
        self._logs = logs
        self._host = host
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._starting = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._reporter: asyncio.Task[None] | None = None
        self._accepted: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._strangers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}  # the oldest first
        self._known: set[Connection] = set()

    async def address(self) -> Address:
        """The address; the first call starts to listen."""
        async with self._starting:
            if self._server is None:
                self._server = await asyncio.start_server(self._accept, self._host, 0, limit=MAX_REQUEST_BYTES)
                self._reporter = asyncio.create_task(self._report())
        return Address(self._host, self._server.sockets[0].getsockname()[1], self._secret)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = cast("asyncio.Task[None]", asyncio.current_task())
        self._accepted[accepted] = writer
        try:
            if await self._is_known(accepted, reader, writer):
                await self._serve(reader, writer)
        finally:
            del self._accepted[accepted]
            writer.close()

    async def _is_known(
        self, accepted: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        if len(self._strangers) >= MAX_STRANGERS:
            self._strangers.pop(next(iter(self._strangers))).transport.abort()
        self._strangers[accepted] = writer
        try:
            return await peer_knows_secret(reader, writer, self._secret)
        finally:
            self._strangers.pop(accepted, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        publisher = MessagePublisher(self._logs, self.rows_publishers, MAX_ITEM_BYTES, self.rows_sent_bytes)
        connection = Connection(reader, writer, publisher, lambda: self._logs.unfinished)
        self._known.add(connection)
        try:
            await connection.serve()
        finally:
            self._known.discard(connection)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            for connection in self._known:
                connection.report()

    def __len__(self) -> int:
        return len(self._accepted)

    async def close(self) -> None:
        if self._server is not None and self._reporter is not None:
            self._server.close()
            self._reporter.cancel()
        accepted = list(self._accepted)
        for writer in self._accepted.values():
            writer.close()  # which ends both sides; asyncio reports a connection's task that was cancelled as an error
        await asyncio.gather(*accepted)
