"""The producer's end of a link: what one consumer reads here, of all its requests, in few messages.

A message costs a process about as much as a token costs the engine, so those of one step of the engine leave together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from omni_cluster.cluster.failures import portable
from omni_cluster.cluster.transport import BulkChunk, LinkItem, Subscription, WireChunk
from omni_cluster.engine.outbox import Outbox, Outboxes, chunk_bytes
from omni_cluster.errors import OmniError

PATIENCE_S = 10.0
"""How long a reader waits for its request to come here."""
IDLE_S = 2.0
"""How long a link that is a call stays open without a reader: a replica that is to end waits for its calls."""


@dataclass(frozen=True, slots=True)
class Item:
    """What is sent next to one reader, its bytes of rows and sound, and the number of the chunk that follows it."""

    sent: LinkItem
    num_bytes: int
    following: int


class Reading:
    """How far one reader has been sent what its request's outbox holds. Calls `notify` when there may be more."""

    def __init__(self, subscription: Subscription, outbox: Outbox, notify: Callable[[Reading], None]) -> None:
        self._subscription = subscription
        self._outbox = outbox
        self._notify = notify
        self._next = 0
        outbox.listen(self._tell)

    def _tell(self) -> None:
        self._notify(self)

    def item(self, max_item_bytes: int) -> Item | None:
        """What to send next; None as long as there is nothing. Chunks that do not join end this reading alone."""
        try:
            waiting = self._outbox.waiting(self._next, max_item_bytes)
        except OmniError as error:
            return self._end(error)
        if waiting is None:
            return self._end(self._outbox.error) if self._outbox.closed else None
        chunk, following = waiting
        reader, with_rows = self._subscription.reader, self._subscription.with_rows
        num_bytes = chunk_bytes(chunk, with_rows=with_rows)
        if num_bytes > max_item_bytes:
            return Item(LinkItem(reader, BulkChunk(self._next)), 0, following)
        return Item(LinkItem(reader, WireChunk.of(chunk, with_rows=with_rows)), num_bytes, following)

    def _end(self, error: BaseException | None) -> Item:
        return Item(
            LinkItem(self._subscription.reader, None, None if error is None else portable(error)), 0, self._next
        )

    def advance(self, item: Item) -> None:
        self._next = item.following

    def abandon(self) -> None:
        """Its reader is gone without a word."""
        self._outbox.abandon()

    def close(self) -> None:
        self._outbox.unlisten(self._tell)


class Outlet:
    """One link. What comes for a request while a message is on its way is joined to one item of the next.

    A message has at most `max_item_bytes` of rows and sound, and one item at least.
    """

    def __init__(self, outboxes: Outboxes, max_item_bytes: int, idle_s: float | None) -> None:
        self._outboxes = outboxes
        self._max_item_bytes = max_item_bytes
        self._idle_s = idle_s
        self._readings: set[Reading] = set()
        self._ready: dict[Reading, None] = {}  # in the order in which they became so
        self._refusals: list[LinkItem] = []
        self._filled = asyncio.Event()
        self._expectations: set[asyncio.Task[None]] = set()

    def subscribe(self, subscription: Subscription) -> None:
        """Sends the request's chunks from the first on; OutboxUnknown to the reader of one that does not come."""
        expectation = asyncio.create_task(self._expect(subscription))
        self._expectations.add(expectation)
        expectation.add_done_callback(self._expectations.discard)

    async def _expect(self, subscription: Subscription) -> None:
        """Stages are started together, so a reader may be here before its request is."""
        try:
            outbox = await self._outboxes.when_open(subscription.request_id, PATIENCE_S)
        except OmniError as error:
            self._refusals.append(LinkItem(subscription.reader, None, error))
            self._filled.set()
        else:
            reading = Reading(subscription, outbox, self._make_ready)
            self._readings.add(reading)
            self._make_ready(reading)

    def abandon(self) -> None:
        """The consumer is gone without a word: nobody can finish the requests that it has not read to their end."""
        for reading in self._readings:
            reading.abandon()

    def _make_ready(self, reading: Reading) -> None:
        self._ready[reading] = None
        self._filled.set()

    async def messages(self) -> AsyncGenerator[list[LinkItem], None]:
        """The messages, until nobody has read here for `idle_s`; None: for ever. The first is empty: it is open."""
        try:
            yield []
            while await self._is_filled():
                if message := self._message():
                    yield message
        finally:
            for expectation in self._expectations:
                expectation.cancel()
            for reading in self._readings:
                reading.close()

    async def _is_filled(self) -> bool:
        while not (self._ready or self._refusals):
            self._filled.clear()
            try:
                await asyncio.wait_for(self._filled.wait(), self._idle_s)
            except asyncio.TimeoutError:
                if not (self._readings or self._expectations):
                    return False
        return True

    def _message(self) -> list[LinkItem]:
        items, self._refusals = self._refusals, []
        num_bytes = 0
        while self._ready:
            reading = next(iter(self._ready))
            item = reading.item(self._max_item_bytes)
            if item is not None and items and num_bytes + item.num_bytes > self._max_item_bytes:
                break
            del self._ready[reading]
            if item is None:
                continue
            items.append(item.sent)
            num_bytes += item.num_bytes
            self._go_on(reading, item)
        return items

    def _go_on(self, reading: Reading, item: Item) -> None:
        """The reading waits behind the others for its next turn, or has ended."""
        if item.sent.body is None:
            self._readings.discard(reading)
            reading.close()
        else:
            reading.advance(item)
            self._ready[reading] = None


class Outlets:
    """The open links of one replica, by the name that the consumer gave each."""

    def __init__(self, outboxes: Outboxes, max_item_bytes: int) -> None:
        self._outboxes = outboxes
        self._max_item_bytes = max_item_bytes
        self._open: dict[str, Outlet] = {}

    async def link(self, name: str, first: Subscription) -> AsyncGenerator[list[LinkItem], None]:
        """Opens link `name` with its first reader."""
        outlet = Outlet(self._outboxes, self._max_item_bytes, IDLE_S)
        outlet.subscribe(first)
        self._open[name] = outlet
        try:
            async with contextlib.aclosing(outlet.messages()) as messages:
                async for message in messages:
                    yield message
        finally:
            del self._open[name]

    def subscribe(self, name: str, subscription: Subscription) -> bool:
        """False when the link has closed meanwhile."""
        outlet = self._open.get(name)
        if outlet is None:
            return False
        outlet.subscribe(subscription)
        return True

    def __len__(self) -> int:
        return len(self._open)
