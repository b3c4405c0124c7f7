"""The producing end of connections: what one consumer reads here, of all its requests, in few messages.

A message costs a process about as much as a token costs the engine, so those of one step of the engine leave together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from omni_cluster.cluster.failures import portable
from omni_cluster.cluster.row_objects import RowsPublisher, RowsPublishers
from omni_cluster.cluster.wire import (
    Heartbeat,
    MessageItem,
    RowsConfirmed,
    Subscription,
    packed,
    peer_knows_secret,
    read_frame,
    write_frame,
)
from omni_cluster.engine.output_log import OutputLog, OutputLogs, chunk_bytes
from omni_cluster.types.errors import OmniError
from omni_cluster.types.outputs import StageChunk
from omni_cluster.types.rows import Rows

logger = logging.getLogger("ray.serve")

PATIENCE_S = 10.0
"""How long a reader waits for its request to come here."""
MAX_ITEM_BYTES = 16 << 20
"""Rows, sound and pictures of one item, and of one message: bounds how long a reader waits for another's."""
MAX_REQUEST_BYTES = 4096
"""The most that a reader may send in one frame."""
MAX_STRANGERS = 16
"""Connections that have not proved the secret yet. One more ends the oldest: a replica's proof takes milliseconds."""
REPORT_S = 0.1
"""How often readers are sent a new load of this replica."""
SECRET_BYTES = 32
GATHER_S = 0.02
"""A reader without rows reads for a client. Between its first item and its last it gets one so often at most: text
comes a token every few milliseconds, and each item is an event in four processes."""


@dataclass(frozen=True, slots=True)
class Item:
    """What is sent next to one reader, its bytes of rows and sound, the number of the chunk behind it, and its rows."""

    sent: MessageItem
    num_bytes: int
    following: int
    rows: Rows | None = None


class Cursor:
    """How far one reader has been sent what its request's log holds. Calls `notify` when there may be more."""

    def __init__(
        self,
        subscription: Subscription,
        log: OutputLog,
        notify: Callable[[Cursor], None],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._subscription = subscription
        self._on_close = on_close
        self._log = log
        self._notify = notify
        self._next = 0
        self._gathers_until_s = 0.0
        log.listen(self._tell)

    def _tell(self) -> None:
        self._notify(self)

    def item(self, max_item_bytes: int) -> Item | None:
        """What to send next; None if there is nothing yet. Chunks that cannot be joined end this cursor alone."""
        try:
            waiting = self._log.waiting(self._next, max_item_bytes)
        except OmniError as error:
            return self._end(error)
        if waiting is None:
            return self._end(self._log.error) if self._log.closed else None
        chunk, following = waiting
        with_rows = self._subscription.rows is not None
        sent = MessageItem(self._subscription.reader, chunk.without_rows())
        num_bytes = chunk_bytes(chunk, with_rows=with_rows)
        return Item(sent, num_bytes, following, chunk.rows if with_rows else None)

    def _end(self, error: BaseException | None) -> Item:
        return Item(
            MessageItem(self._subscription.reader, None, None if error is None else portable(error)), 0, self._next
        )

    def advance(self, item: Item, now_s: float) -> None:
        self._next = item.following
        self._gathers_until_s = now_s + GATHER_S if self._subscription.rows is None else 0.0

    def gathers_for_s(self, now_s: float) -> float:
        """How long its next item waits for more; the request's last one does not."""
        return 0.0 if self._log.closed else max(0.0, self._gathers_until_s - now_s)

    def abandon(self) -> None:
        """Its reader disappeared without closing."""
        self._log.abandon()

    def close(self) -> None:
        self._log.unlisten(self._tell)
        self._on_close()


class MessagePublisher:
    """Publishes to one connection. What a request makes while a message is on its way is one item of the next.

    A message, with its rows, has at most `max_item_bytes` of rows and sound, and one item at least. Rows are published
    by themselves, and the message says where.
    """

    def __init__(
        self, logs: OutputLogs, rows_publishers: RowsPublishers, max_item_bytes: int, sent: Counter[str]
    ) -> None:
        """`sent`: see `SocketServer.rows_sent_bytes`."""
        self._logs = logs
        self._rows_publishers = rows_publishers
        self._sent = sent
        self._max_item_bytes = max_item_bytes
        self._rows_publisher: RowsPublisher | None = None
        self._rows_publisher_name = ""
        self._cursors: set[Cursor] = set()
        self._ready: dict[Cursor, None] = {}  # in the order in which they became ready
        self._gathering: dict[Cursor, asyncio.TimerHandle] = {}
        self._loop = asyncio.get_running_loop()
        self._refusals: list[MessageItem] = []
        self._filled = asyncio.Event()
        self._expectations: set[asyncio.Task[None]] = set()

    def take(self, said: Subscription | RowsConfirmed) -> None:
        """What the consumer says."""
        if isinstance(said, Subscription):
            self.subscribe(said)
        elif self._rows_publisher is not None:
            self._rows_publisher.confirm(said.end)

    def subscribe(self, subscription: Subscription) -> None:
        """Sends the request's chunks from the first on; OutputLogUnknown to the reader of one that does not come."""
        if subscription.ends:
            self._logs.abandon(subscription.request_id)
            return
        if subscription.rows is not None and self._rows_publisher is None:
            self._rows_publisher_name = subscription.rows
            self._rows_publisher = self._rows_publishers.open(subscription.rows, self._is_read)
        expectation = asyncio.create_task(self._expect(subscription))
        self._expectations.add(expectation)
        expectation.add_done_callback(self._expectations.discard)

    async def _expect(self, subscription: Subscription) -> None:
        """Stages are started together, so a reader may be here before its request is."""
        try:
            log = await self._logs.when_open(subscription.request_id, PATIENCE_S)
        except OmniError as error:
            self._refusals.append(MessageItem(subscription.reader, None, error))
            self._filled.set()
            return
        if subscription.earlier_from is None:
            self._add(Cursor(subscription, log, self._make_ready))
            return
        aside = self._logs.aside(subscription.request_id)
        self._add(Cursor(subscription, aside, self._make_ready, aside.let_go))
        await self._fill_with_earlier(aside, log, subscription.earlier_from)

    async def _fill_with_earlier(self, aside: OutputLog, log: OutputLog, first: int) -> None:
        """Whatever breaks, the reader gets the error."""
        try:
            async with contextlib.aclosing(log.earlier_rows(first)) as parts:
                async for rows in parts:
                    aside.put(StageChunk(rows=rows))
                    self._sent["asked"] += rows.raw.nbytes
            aside.close()
        except Exception as error:
            if not isinstance(error, OmniError):
                logger.exception(
                    "hidden states from position %d on, which a request had left out, could not be sent", first
                )
            aside.fail(portable(error))

    def _add(self, cursor: Cursor) -> None:
        self._cursors.add(cursor)
        self._make_ready(cursor)

    def abandon(self) -> None:
        """The consumer disappeared without closing: requests that it has not read to their end cannot finish."""
        for cursor in self._cursors:
            cursor.abandon()

    def _make_ready(self, cursor: Cursor) -> None:
        """Now, or when it has gathered for long enough."""
        wait_s = cursor.gathers_for_s(self._loop.time())
        if not wait_s:
            self._end_gathering(cursor)
        elif cursor not in self._gathering:
            self._gathering[cursor] = self._loop.call_later(wait_s, self._end_gathering, cursor)

    def _end_gathering(self, cursor: Cursor) -> None:
        if (timer := self._gathering.pop(cursor, None)) is not None:
            timer.cancel()
        self._ready[cursor] = None
        self._filled.set()

    def _is_read(self) -> bool:
        return bool(self._cursors or self._expectations)

    async def messages(self) -> AsyncGenerator[list[MessageItem], None]:
        """Yields messages without end. The first is empty: the connection is open."""
        try:
            yield []
            while True:
                await self._until_filled()
                if message := self._message():
                    yield message
        finally:
            self._close()

    async def _until_filled(self) -> None:
        while not (self._ready or self._refusals):
            self._filled.clear()
            await self._filled.wait()

    def _close(self) -> None:
        for expectation in self._expectations:
            expectation.cancel()
        for timer in self._gathering.values():
            timer.cancel()
        for cursor in self._cursors:
            cursor.close()
        if self._rows_publisher is not None:
            self._rows_publishers.close(self._rows_publisher_name)

    def _message(self) -> list[MessageItem]:
        items, self._refusals = self._refusals, []
        num_bytes = 0
        while self._ready:
            cursor = next(iter(self._ready))
            item = cursor.item(self._max_item_bytes)
            if item is not None and items and num_bytes + item.num_bytes > self._max_item_bytes:
                break
            del self._ready[cursor]
            if item is None:
                continue
            items.append(self._with_rows_published(item))
            num_bytes += item.num_bytes
            self._go_on(cursor, item)
        return items

    def _go_on(self, cursor: Cursor, item: Item) -> None:
        """Puts the cursor behind the others for its next turn, or closes it at its end."""
        if item.sent.chunk is None:
            self._cursors.discard(cursor)
            cursor.close()
        else:
            cursor.advance(item, self._loop.time())
            self._ready[cursor] = None

    def _with_rows_published(self, item: Item) -> MessageItem:
        if item.rows is None or self._rows_publisher is None:
            return item.sent
        packed = item.rows.pack()
        self._sent["as_objects"] += packed.nbytes
        return msgspec.structs.replace(item.sent, rows_at=self._rows_publisher.publish(packed))


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
        self._write([])

    def _write(self, parts: Sequence[Any]) -> None:
        """What closes is written to no more: its reader has left."""
        if not self._writer.is_closing():
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
        self.rows_publishers = RowsPublishers(logs.budget)
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
