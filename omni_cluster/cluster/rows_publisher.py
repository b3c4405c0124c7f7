"""The producer's end of a connection's conditioning rows: Ray objects, which the consumer reads by reference.

A message names the rows of each chunk by a number. They come in the order of their numbers, in items of one streaming
call of Ray's. An item belongs to whoever called, from before it is made: Ray frees it when the caller has let go of it,
or is dead. A reference inside an item would not hold its object: Ray may ask the caller whether it still wants the
object before the caller has heard of the item. A reference sent outside of Ray's calls would never be freed.

The rows of an item that finds no room, in the store here or in that of the caller, are lost. The caller calls again for
all that follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from omni_cluster.engine.room import Room

IDLE_S: Final = 2.0
"""How long a call that nobody reads stays open: a replica that is to end waits for its calls."""
PATIENCE_S: Final = 10.0
"""How long a call waits for the connection whose rows it asks for."""
ITEM_BYTES: Final = 1 << 20
"""Rows that wait are one item up to so many bytes."""
SMALL_ITEM_BYTES: Final = 64 << 10
"""The same once the store was full: Ray sends what has less than 100 KB without its store. Rows of a chunk with more, a
prompt's, are an item of their own: they alone end with it.
"""


@dataclass(slots=True, eq=False)
class RowsItem:
    """Packed rows of chunks, each a uint8 array, with numbers from `first` on. Who reads them empties the item."""

    first: int
    rows: list[np.ndarray]
    is_sent: bool = False

    def __reduce__(self) -> tuple[type[RowsItem], tuple[int, list[np.ndarray]]]:
        """Called once, by Ray as it stores or sends the item: Serve takes items before Ray has use for them.

        Rows that only together need the store are kept: they can be sent one by one.
        """
        rows, self.is_sent = self.rows, True
        if len(rows) == 1 or self.num_bytes <= SMALL_ITEM_BYTES:
            self.rows = []
        return RowsItem, (self.first, rows)

    @property
    def num_bytes(self) -> int:
        return sum(packed.nbytes for packed in self.rows)


class RowsPublisher:
    """The rows of one connection's messages. `is_read`: whether a request whose rows go here is being read."""

    def __init__(self, is_read: Callable[[], bool], room: Room) -> None:
        self._is_read = is_read
        self._room = room
        self._waiting: deque[np.ndarray] = deque()
        self._first = 0
        """The number of the first that waits."""
        self._given: deque[RowsItem] = deque()
        """Items that a call has taken: the last that was sent, and those behind it."""
        self._changed = asyncio.Event()
        self._is_closed = False
        self._call = 0

    def publish(self, packed: np.ndarray) -> int:
        """Queues the rows of one chunk. Returns their number."""
        self._waiting.append(packed)
        self._room.hold(packed.nbytes)
        self._changed.set()
        return self._first + len(self._waiting) - 1

    async def items(self, *, again: bool = False) -> AsyncGenerator[RowsItem, None]:
        """Yields the rows that are there, in few items. Ends with the connection, when idle, or as a later call begins.

        `again`: an item of the call before found no room. The first item is empty, and says which rows follow: among
        them those that Ray had no use for yet. Rows that need no store are not put together until they do.
        """
        self._call += 1
        call = self._call
        self._changed.set()  # ends the call before
        if again:
            self._take_back()
            yield RowsItem(self._first, [])
        while await self._is_filled(call):
            yield self._next_item(SMALL_ITEM_BYTES if again else ITEM_BYTES)

    def _take_back(self) -> None:
        """Of the last that was sent too what can go in smaller items: the caller drops what comes twice."""
        while self._given:
            item = self._given.pop()
            rows = list(item.rows)
            self._waiting.extendleft(reversed(rows))
            self._first -= len(rows)
            self._room.hold(sum(packed.nbytes for packed in rows))
            if item.is_sent:
                self._given.clear()

    def _next_item(self, max_bytes: int) -> RowsItem:
        rows = [self._waiting.popleft()]
        left = 0 if rows[0].nbytes > SMALL_ITEM_BYTES else max_bytes - rows[0].nbytes
        while self._waiting and self._waiting[0].nbytes <= min(left, SMALL_ITEM_BYTES):
            left -= self._waiting[0].nbytes
            rows.append(self._waiting.popleft())
        item = RowsItem(self._first, rows)
        self._first += len(rows)
        self._room.release(item.num_bytes)
        while len(self._given) > 1 and self._given[1].is_sent:
            self._given.popleft()
        self._given.append(item)
        return item

    async def _is_filled(self, call: int) -> bool:
        while not (self._waiting or self._is_closed) and call == self._call:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), IDLE_S)
            except asyncio.TimeoutError:
                if not self._is_read():
                    return False
        return call == self._call and not self._is_closed

    def close(self) -> None:
        self._is_closed = True
        self._room.release(sum(packed.nbytes for packed in self._waiting))
        self._waiting.clear()
        self._given.clear()
        self._changed.set()


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

    async def items(self, name: str, *, again: bool = False) -> AsyncGenerator[RowsItem, None]:
        """See `RowsPublisher.items`. Yields nothing if the connection of that name is gone, or comes too late."""
        self.calls += 1
        try:
            publisher = await self._when_open(name)
            if publisher is not None:
                async with contextlib.aclosing(publisher.items(again=again)) as items:
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
