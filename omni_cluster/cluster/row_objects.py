"""Both ends of a connection's conditioning rows: Ray objects, which the consumer reads by reference.

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
import contextvars
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from omni_cluster.cluster.failures import named
from omni_cluster.cluster.transport import RemoteStage
from omni_cluster.engine.memory_budget import MemoryBudget
from omni_cluster.types.errors import NO_ROOM, StoreFull, without_frames
from omni_cluster.types.rows import LARGE_BYTES

IDLE_S: Final = 2.0
"""How long a call that is not read stays open: a replica that is to end waits for its calls."""
PATIENCE_S: Final = 10.0
"""How long a call waits for the connection whose rows it asks for."""
CANCELS_S: Final = 5.0
"""In which a consumer that lives cancels its call once the connection is closed."""
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

    def __init__(self, is_read: Callable[[], bool], budget: MemoryBudget) -> None:
        self._is_read = is_read
        self._budget = budget
        self._kept: deque[np.ndarray] = deque()
        self._first = 0
        """The number of the first that is kept: all before it are confirmed."""
        self._changed = asyncio.Event()
        self._is_closed = False
        self._call = 0

    @property
    def _end(self) -> int:
        return self._first + len(self._kept)

    def publish(self, packed: np.ndarray) -> int:
        """Queues the rows of one chunk. Returns their number."""
        self._kept.append(packed)
        self._budget.hold(packed.nbytes)
        self._changed.set()
        return self._end - 1

    def confirm(self, end: int) -> None:
        """The consumer has all rows with numbers before `end`, or does without them."""
        while self._first < min(end, self._end):
            self._budget.release(self._kept.popleft().nbytes)
            self._first += 1

    async def items(self, first: int) -> AsyncGenerator[RowsItem, None]:
        """Yields rows from number `first` on; what waits is one item as long as it is small.

        Ends with the connection, when idle, or as a later call begins. A call that ends holds the replica's event loop
        until its caller has all items, or Ray knows that the caller is dead: 15 s if its node died too, in which the
        replica takes no other call. So as long as rows that it has yielded are not confirmed, it is not idle, and is
        cancelled in place of ending with the connection.
        """
        self._call += 1
        call, number = self._call, first
        self._changed.set()  # ends the call before
        while await self._has(number, call):
            rows = self._together(number)
            first, number = number, number + len(rows)
            yield RowsItem(first, rows)
        if self._is_closed and self._first < number:
            await asyncio.sleep(CANCELS_S)
            raise asyncio.CancelledError

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
                if self._first >= number and not self._is_read():
                    return False
        return call == self._call and not self._is_closed

    def close(self) -> None:
        self._is_closed = True
        self._budget.release(sum(packed.nbytes for packed in self._kept))
        self._kept.clear()
        self._changed.set()


class RowsPublishers:
    """The publishers of one replica, by the name that the consumer gave each."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._open: dict[str, RowsPublisher] = {}
        self._opened = asyncio.Event()
        self.calls = 0

    def open(self, name: str, is_read: Callable[[], bool]) -> RowsPublisher:
        publisher = self._open[name] = RowsPublisher(is_read, self._budget)
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


RowsFuture = asyncio.Future[np.ndarray]
"""The packed rows of one chunk."""


class RowsReader:
    """Matches rows with the messages that name them, whichever comes first.

    `confirm` is called with the number before which all rows have come, or are lost.
    """

    def __init__(self, source: RemoteStage, replica_id: str, confirm: Callable[[int], None]) -> None:
        self.name = uuid.uuid4().hex
        self._source = source
        self._replica_id = replica_id
        self._confirm = confirm
        self._half_met: dict[int, RowsFuture] = {}  # those of which either the message or the rows came
        self._next = 0
        """All rows with lower numbers have come, or are lost."""
        self._call: asyncio.Task[None] | None = None
        self.broke: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    @property
    def is_broken(self) -> bool:
        return self.broke.done()

    def open(self) -> None:
        """Calls the producer, unless a call is open. The producer ends a call that is not read."""
        if not self.is_broken and (self._call is None or self._call.done()):
            # In a context of its own: Serve ends the calls that a request made when that request ends.
            self._call = asyncio.create_task(self._read(), context=contextvars.Context())

    def expect(self, number: int) -> RowsFuture:
        """A message said that a chunk's rows have that number; called once for each."""
        is_lost = number < self._next and number not in self._half_met
        rows = self._meet(number)
        if is_lost:
            self._lose(number)
        if self.is_broken:
            self._break(rows, self.broke.result())
        self.open()
        return rows

    async def _read(self) -> None:
        try:
            await self._take_items()
            while any(not rows.done() for rows in self._half_met.values()):
                await self._take_items()
        except Exception as raised:  # every reader of the connection raises it
            self._fail(named(raised))

    async def _take_items(self) -> None:
        """Takes all items of one call. One that finds no room ends it, and the first rows of that item are lost."""
        items: AsyncGenerator[RowsItem, None] = self._source.stream(
            "rows", self.name, self._next, replica_id=self._replica_id, by_reference=True
        )
        try:
            async with contextlib.aclosing(items):
                async for item in items:
                    self._take(item.first, await _copied_out(item))
        except StoreFull as error:
            without_frames(error)  # they have the item's reference, and stay until garbage is collected
            self._take(self._next + 1, [])

    def _take(self, first: int, rows: list[np.ndarray]) -> None:
        """Rows before the first that have not come are lost, and end their readers alone."""
        for number in [number for number in self._half_met if self._next <= number < first]:
            self._lose(number)
        for number, packed in enumerate(rows, first):
            self._meet(number).set_result(packed)
        self._next = first + len(rows)
        self._confirm(self._next)

    def _lose(self, number: int) -> None:
        self._break(self._half_met.pop(number), StoreFull(NO_ROOM))

    def _meet(self, number: int) -> RowsFuture:
        """Called once for the message and once for the rows: the second call finds the first one's future."""
        rows = self._half_met.pop(number, None)
        if rows is None:
            rows = self._half_met[number] = asyncio.get_running_loop().create_future()
        return rows

    def _fail(self, error: Exception) -> None:
        """No further rows come."""
        if not self.is_broken:
            self.broke.set_result(error)
        half_met, self._half_met = self._half_met, {}
        for rows in half_met.values():
            self._break(rows, error)

    def _break(self, rows: RowsFuture, error: Exception) -> None:
        if not rows.done():
            rows.set_exception(error)
            rows.exception()  # marks it as seen: its reader may have left

    def close(self, error: Exception) -> None:
        self._fail(error)
        if self._call is not None:
            self._call.cancel()


async def _copied_out(item: RowsItem) -> list[np.ndarray]:
    """The rows in memory of their own; the item is emptied.

    Its arrays are mapped, and the store keeps their object as long as anything has one: whatever passed the item on has
    it until the next comes, a reader may be slow, and an error's frames stay until garbage is collected.
    """
    if item.num_bytes <= LARGE_BYTES:
        return _moved(item)
    return await asyncio.to_thread(_moved, item)  # a long prompt's copy takes milliseconds


def _moved(item: RowsItem) -> list[np.ndarray]:
    rows = [np.array(packed) for packed in item.rows]
    item.rows.clear()
    return rows
