"""The consumer's end of a connection's conditioning rows; see `rows_publisher`."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import uuid
from collections.abc import AsyncGenerator

import numpy as np

from omni_cluster.cluster.failures import named
from omni_cluster.cluster.rows_publisher import ITEM_BYTES, Batch, num_bytes
from omni_cluster.cluster.transport import RemoteStage

Rows = asyncio.Future[list[np.ndarray]]
"""The rows of one batch: for each request an array."""


class RowsReader:
    """Matches rows with the messages that name them, whichever comes first."""

    def __init__(self, source: RemoteStage, replica_id: str) -> None:
        self.name = uuid.uuid4().hex
        self._source = source
        self._replica_id = replica_id
        self._half_met: dict[int, Rows] = {}  # batches of which either the message or the rows came
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

    def expect(self, number: int) -> Rows:
        """A message said that its rows are batch `number`; called once for each."""
        rows = self._meet(number)
        if self.is_broken:
            self._break(rows, self.broke.result())
        self.open()
        return rows

    async def _read(self) -> None:
        try:
            while True:
                calls: AsyncGenerator[list[Batch], None] = self._source.stream(
                    "rows", self.name, replica_id=self._replica_id, by_reference=True
                )
                async with contextlib.aclosing(calls) as items:
                    async for item in items:
                        for number, rows in await _copied_out(item):
                            self._meet(number).set_result(rows)
                if not self._is_waited_for():
                    return
        except Exception as raised:  # given to every reader of the connection, who raises it
            self._fail(named(raised))

    def _is_waited_for(self) -> bool:
        return any(not rows.done() for rows in self._half_met.values())

    def _meet(self, number: int) -> Rows:
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

    def _break(self, rows: Rows, error: Exception) -> None:
        if not rows.done():
            rows.set_exception(error)
            rows.exception()  # marks it as seen: its reader may have left

    def close(self, error: Exception) -> None:
        self._fail(error)
        if self._call is not None:
            self._call.cancel()


async def _copied_out(item: list[Batch]) -> list[Batch]:
    """The batches in memory of their own; the item is emptied.

    Its arrays are mapped, and the store keeps their object as long as anything has one: whatever passed the item on has
    it until the next comes, a reader may be slow, and an error's frames stay until garbage is collected.
    """
    if sum(map(num_bytes, item)) <= ITEM_BYTES:
        return _moved(item)
    return await asyncio.to_thread(_moved, item)  # a long prompt's copy takes milliseconds


def _moved(item: list[Batch]) -> list[Batch]:
    batches = [(number, [np.array(packed) for packed in rows]) for number, rows in item]
    item.clear()
    return batches
