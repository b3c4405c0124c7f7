"""The producer's end of a link: what one consumer reads here, of all its requests, in few messages.

A message costs a process about as much as a token costs the engine, so those of one step of the engine leave together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator

from omni_cluster.cluster.transport import BulkChunk, LinkItem, Subscription, WireChunk
from omni_cluster.engine.outbox import Outbox, Outboxes, chunk_bytes
from omni_cluster.errors import OmniError

IDLE_S = 2.0
"""How long a link without a reader stays open: a replica that is to end waits for its calls."""


class StageFailed(Exception):
    """A stage broke while it worked on a request; its own log has the cause."""


class Outlet:
    """One link. Holds one item a subscribed request at most: what comes meanwhile is joined to the next.

    A message has at most `max_item_bytes` of rows, and one item at least.
    """

    def __init__(self, outboxes: Outboxes, max_item_bytes: int) -> None:
        self._outboxes = outboxes
        self._max_item_bytes = max_item_bytes
        self._waiting: deque[tuple[LinkItem, int, asyncio.Event]] = deque()
        self._filled = asyncio.Event()
        self._readings: set[asyncio.Task[None]] = set()

    def subscribe(self, subscription: Subscription) -> None:
        """Sends the request's chunks from the first on. Raises OutboxUnknown for one that is not here."""
        outbox = self._outboxes.get(subscription.request_id)
        reading = asyncio.create_task(self._send_all(subscription, outbox))
        self._readings.add(reading)
        reading.add_done_callback(self._readings.discard)

    async def messages(self) -> AsyncGenerator[list[LinkItem], None]:
        """The messages, until nobody has read here for `IDLE_S`. The first is empty: the link is open."""
        try:
            yield []
            while await self._something_to_send():
                yield self._message()
        finally:
            for reading in self._readings:
                reading.cancel()

    async def _something_to_send(self) -> bool:
        while not self._waiting:
            self._filled.clear()
            try:
                await asyncio.wait_for(self._filled.wait(), IDLE_S)
            except asyncio.TimeoutError:
                if not self._readings:
                    return False
        return True

    def _message(self) -> list[LinkItem]:
        items: list[LinkItem] = []
        num_bytes = 0
        while self._waiting:
            item, item_bytes, taken = self._waiting[0]
            num_bytes += item_bytes
            if items and num_bytes > self._max_item_bytes:
                break
            self._waiting.popleft()
            taken.set()
            items.append(item)
        return items

    async def _send_all(self, subscription: Subscription, outbox: Outbox) -> None:
        error: Exception | None = None
        try:
            async with contextlib.aclosing(outbox.items(self._max_item_bytes)) as items:
                async for number, chunk in items:
                    if not subscription.with_rows:
                        chunk = chunk.without_rows()
                    num_bytes = chunk_bytes(chunk)
                    is_bulk = num_bytes > self._max_item_bytes
                    body = BulkChunk(number) if is_bulk else WireChunk.of(chunk)
                    await self._send(LinkItem(subscription.reader, body), 0 if is_bulk else num_bytes)
        except Exception as raised:  # handed to the reader, who raises it
            error = portable(raised)
        await self._send(LinkItem(subscription.reader, None, error), 0)

    async def _send(self, item: LinkItem, num_bytes: int) -> None:
        taken = asyncio.Event()
        self._waiting.append((item, num_bytes, taken))
        self._filled.set()
        await taken.wait()


def portable(error: Exception) -> Exception:
    """The error as another process can read it: our own as they are, of others what they say."""
    return error if isinstance(error, OmniError) else StageFailed(f"{type(error).__name__}: {error}")


class Outlets:
    """The open links of one replica, by the name that the consumer gave each."""

    def __init__(self, outboxes: Outboxes, max_item_bytes: int) -> None:
        self._outboxes = outboxes
        self._max_item_bytes = max_item_bytes
        self._open: dict[str, Outlet] = {}

    async def link(self, name: str, first: Subscription) -> AsyncGenerator[list[LinkItem], None]:
        """Opens link `name`. Raises OutboxUnknown when the first request is not here."""
        outlet = Outlet(self._outboxes, self._max_item_bytes)
        outlet.subscribe(first)
        self._open[name] = outlet
        try:
            async with contextlib.aclosing(outlet.messages()) as messages:
                async for message in messages:
                    yield message
        finally:
            del self._open[name]

    def subscribe(self, name: str, subscription: Subscription) -> bool:
        """False when the link has closed meanwhile. Raises OutboxUnknown when the request is not here."""
        outlet = self._open.get(name)
        if outlet is None:
            return False
        outlet.subscribe(subscription)
        return True

    def __len__(self) -> int:
        return len(self._open)
