"""The consumer's end of a connection's conditioning rows; see `rows_publisher`."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import uuid
from collections.abc import AsyncGenerator, Callable

import numpy as np

from omni_cluster.cluster.failures import named
from omni_cluster.cluster.rows_publisher import RowsItem
from omni_cluster.cluster.transport import RemoteStage
from omni_cluster.errors import NO_ROOM, StoreFull
from omni_cluster.rows import LARGE_BYTES

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
        """Calls the producer, unless a call is open. The producer ends a call that nobody reads."""
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
        except Exception as raised:  # given to every reader of the connection, who raises it
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
        except StoreFull:
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
