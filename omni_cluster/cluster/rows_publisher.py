"""The producer's end of a connection's conditioning rows: Ray objects, which the consumer reads by reference.

A message names the rows of each chunk by a number. They come in the order of their numbers, as items of one streaming
call of Ray's. An item belongs to the process that called, from before it is made: Ray frees it when that process has
let go of it, or is dead. A reference inside an item would not hold its object: Ray may ask the caller whether it still
wants the object before the caller has heard of the item. A reference sent outside of Ray's calls would never be freed.

Only rows above `DIRECT_BYTES` need Ray's store, and are an item of their own. They are lost if the store has no room,
here or where the caller is. That ends the call, and with it items that Serve took and Ray did not send. So rows are
kept until the consumer has confirmed them; its next call says from which number on.
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
DIRECT_BYTES: Final = 64 << 10
"""Rows that wait are one item up to so many bytes: Ray sends less than 100 KB without its store."""


@dataclass(frozen=True, slots=True)
class RowsItem:
    """Packed rows of chunks, each a uint8 array, with numbers from `first` on."""

    first: int
    rows: list[np.ndarray]

    @property
    def num_bytes(self) -> int:
        return sum(packed.nbytes for packed in self.rows)


class RowsPublisher:
    """The rows of one connection's messages. `is_read`: whether a request whose rows go here is being read."""

    def __init__(self, is_read: Callable[[], bool], room: Room) -> None:
        self._is_read = is_read
        self._room = room
        self._kept: deque[np.ndarray] = deque()
        self._first = 0
        """The number of the first that is kept."""
        self._changed = asyncio.Event()
        self._is_closed = False
        self._call = 0

    @property
    def _end(self) -> int:
        return self._first + len(self._kept)

    def publish(self, packed: np.ndarray) -> int:
        """Queues the rows of one chunk. Returns their number."""
        self._kept.append(packed)
        self._room.hold(packed.nbytes)
        self._changed.set()
        return self._end - 1

    def confirm(self, end: int) -> None:
        """The consumer has all rows with numbers before `end`, or does without them."""
        while self._first < min(end, self._end):
            self._room.release(self._kept.popleft().nbytes)
            self._first += 1

    async def items(self, first: int) -> AsyncGenerator[RowsItem, None]:
        """Yields rows from number `first` on; what waits is one item as long as it is small.

        Ends with the connection, when idle, or as a later call begins.
        """
        self._call += 1
        call, number = self._call, first
        self._changed.set()  # ends the call before
        while await self._has(number, call):
            rows = self._together(number)
            first, number = number, number + len(rows)
            yield RowsItem(first, rows)

    def _together(self, number: int) -> list[np.ndarray]:
        rows = [self._kept[number - self._first]]
        left = DIRECT_BYTES - rows[0].nbytes
        for following in range(number + 1, self._end):
            packed = self._kept[following - self._first]
            left -= packed.nbytes
            if left < 0:
                break
            rows.append(packed)
        return rows

    async def _has(self, number: int, call: int) -> bool:
        while number >= self._end and not self._is_closed and call == self._call:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), IDLE_S)
            except asyncio.TimeoutError:
                if not self._is_read():
                    return False
        return call == self._call and not self._is_closed

    def close(self) -> None:
        self._is_closed = True
        self.confirm(self._end)
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

    async def items(self, name: str, first: int) -> AsyncGenerator[RowsItem, None]:
        """See `RowsPublisher.items`. Yields nothing if the connection of that name is gone, or comes too late."""
        self.calls += 1
        try:
            publisher = await self._when_open(name)
            if publisher is not None:
                async with contextlib.aclosing(publisher.items(first)) as items:
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
