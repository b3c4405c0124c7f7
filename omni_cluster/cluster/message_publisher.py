"""The producer's end of a connection: what one consumer reads here, of all its requests, in few messages.

A message costs a process about as much as a token costs the engine, so those of one step of the engine leave together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import msgspec

from omni_cluster.cluster.failures import portable
from omni_cluster.cluster.row_objects import RowsPublisher, RowsPublishers
from omni_cluster.cluster.wire import MessageItem, RowsConfirmed, Subscription
from omni_cluster.engine.output_log import OutputLog, OutputLogs, chunk_bytes
from omni_cluster.errors import OmniError
from omni_cluster.outputs import StageChunk
from omni_cluster.rows import Rows

logger = logging.getLogger("ray.serve")

PATIENCE_S = 10.0
"""How long a reader waits for its request to come here."""


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

    def advance(self, item: Item) -> None:
        self._next = item.following

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
                logger.exception("rows from %d on that a request left out failed", first)
            aside.fail(portable(error))

    def _add(self, cursor: Cursor) -> None:
        self._cursors.add(cursor)
        self._make_ready(cursor)

    def abandon(self) -> None:
        """The consumer disappeared without closing: nobody can finish requests that it has not read to their end."""
        for cursor in self._cursors:
            cursor.abandon()

    def _make_ready(self, cursor: Cursor) -> None:
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
            cursor.advance(item)
            self._ready[cursor] = None

    def _with_rows_published(self, item: Item) -> MessageItem:
        if item.rows is None or self._rows_publisher is None:
            return item.sent
        packed = item.rows.pack()
        self._sent["as_objects"] += packed.nbytes
        return msgspec.structs.replace(item.sent, rows_at=self._rows_publisher.publish(packed))
