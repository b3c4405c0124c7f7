"""The producer's end of a connection's conditioning rows: Ray objects, which the consumer reads by reference.

A message names its rows by the number of a batch and a place in it. The batches are items of one
streaming call of Ray's, so Ray counts the references and frees the objects. A reference sent outside of Ray's calls
would never be freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import numpy as np
import ray

IDLE_S: Final = 2.0
"""How long a call that nobody reads stays open: a replica that is to end waits for its calls."""
PATIENCE_S: Final = 10.0
"""How long a call waits for the connection whose rows it asks for."""
OWN_OBJECT_BYTES: Final = 65_536
"""Rows of so many bytes, a prompt's, are an object of their own, which its reader maps; fewer are in their item."""

Batch = tuple[int, list[Any]]
"""A number, and for each request its packed rows, a uint8 array, or a reference to one."""


class RowsPublisher:
    """The rows of one connection's messages. `is_read`: whether a request whose rows go here is being read."""

    def __init__(self, is_read: Callable[[], bool]) -> None:
        self._is_read = is_read
        self._waiting: deque[tuple[int, list[np.ndarray]]] = deque()
        self._changed = asyncio.Event()
        self._is_closed = False
        self._next = 0

    def publish(self, rows: list[np.ndarray]) -> int:
        """Queues the rows as one batch. Returns its number."""
        number = self._next
        self._next += 1
        self._waiting.append((number, rows))
        self._changed.set()
        return number

    async def items(self) -> AsyncGenerator[list[Batch], None]:
        """Yields all batches that are there as one item. Ends with the connection, or when it is idle."""
        while await self._is_filled():
            batches = list(self._waiting)
            self._waiting.clear()
            yield [(number, [await _by_reference(packed) for packed in rows]) for number, rows in batches]

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
        self._waiting.clear()
        self._changed.set()


async def _by_reference(packed: np.ndarray) -> Any:
    if packed.nbytes < OWN_OBJECT_BYTES:
        return packed
    return await asyncio.to_thread(ray.put, packed)  # a long prompt's copy takes milliseconds


class RowsPublishers:
    """The publishers of one replica, by the name that the consumer gave each."""

    def __init__(self) -> None:
        self._open: dict[str, RowsPublisher] = {}
        self._opened = asyncio.Event()
        self.calls = 0

    def open(self, name: str, is_read: Callable[[], bool]) -> RowsPublisher:
        publisher = self._open[name] = RowsPublisher(is_read)
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
