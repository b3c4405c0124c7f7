"""The producer's end of a connection's conditioning rows: Ray objects, which the consumer reads by reference.

A message names its rows by the number of a batch and a place in it. The batches are items of one streaming call of
Ray's. An item belongs to whoever called, from before it is made: Ray frees it when the caller has let go of it, or is
dead. A reference inside an item would not hold its object: Ray may ask the caller whether it still wants the object
before the caller has heard of the item. A reference sent outside of Ray's calls would never be freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Final

import numpy as np

from omni_cluster.engine.room import Room

IDLE_S: Final = 2.0
"""How long a call that nobody reads stays open: a replica that is to end waits for its calls."""
PATIENCE_S: Final = 10.0
"""How long a call waits for the connection whose rows it asks for."""
ITEM_BYTES: Final = 1 << 20
"""Batches that wait are one item up to so many bytes. A batch of more, with a prompt's rows, is an item of its own."""

Batch = tuple[int, list[np.ndarray]]
"""A number, and for each request its packed rows, a uint8 array."""


class RowsPublisher:
    """The rows of one connection's messages. `is_read`: whether a request whose rows go here is being read."""

    def __init__(self, is_read: Callable[[], bool], room: Room) -> None:
        self._is_read = is_read
        self._room = room
        self._waiting: deque[Batch] = deque()
        self._changed = asyncio.Event()
        self._is_closed = False
        self._next = 0

    def publish(self, rows: list[np.ndarray]) -> int:
        """Queues the rows as one batch. Returns its number."""
        number = self._next
        self._next += 1
        self._waiting.append((number, rows))
        self._room.hold(num_bytes(self._waiting[-1]))
        self._changed.set()
        return number

    async def items(self) -> AsyncGenerator[list[Batch], None]:
        """Yields the batches that are there, in few items. Ends with the connection, or when it is idle."""
        while await self._is_filled():
            yield self._next_item()

    def _next_item(self) -> list[Batch]:
        item = [self._waiting.popleft()]
        left = ITEM_BYTES - num_bytes(item[0])
        while self._waiting and (left := left - num_bytes(self._waiting[0])) >= 0:
            item.append(self._waiting.popleft())
        self._room.release(sum(map(num_bytes, item)))
        return item

    async def _is_filled(self) -> bool:
        while not (self._waiting or self._is_closed):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), IDLE_S)
            except asyncio.TimeoutError:
                if not self._is_read():
                    return False
        return not self._is_closed

    def close(self) -> None:
        self._is_closed = True
        self._room.release(sum(map(num_bytes, self._waiting)))
        self._waiting.clear()
        self._changed.set()


def num_bytes(batch: Batch) -> int:
    return sum(packed.nbytes for packed in batch[1])


class RowsPublishers:
    """The publishers of one replica, by the name that the consumer gave each."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._open: dict[str, RowsPublisher] = {}
        self._opened = asyncio.Event()
        self.calls = 0

    def open(self, name: str, is_read: Callable[[], bool]) -> RowsPublisher:
        publisher = self._open[name] = RowsPublisher(is_read, self._room)
        self._opened.set()
        self._opened = asyncio.Event()
        return publisher

    def close(self, name: str) -> None:
        self._open.pop(name).close()

    async def items(self, name: str) -> AsyncGenerator[list[Batch], None]:
        """See `RowsPublisher.items`. Yields nothing if the connection of that name is gone, or comes too late."""
        self.calls += 1
        try:
            publisher = await self._when_open(name)
            if publisher is not None:
                async with contextlib.aclosing(publisher.items()) as items:
                    async for item in items:
                        yield item
        finally:
            self.calls -= 1

    async def _when_open(self, name: str) -> RowsPublisher | None:
        """Waits for the connection, since the call may come first."""
        ends_s = time.monotonic() + PATIENCE_S
        while name not in self._open and (left_s := ends_s - time.monotonic()) > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._opened.wait(), left_s)
        return self._open.get(name)

    def __len__(self) -> int:
        return len(self._open)
