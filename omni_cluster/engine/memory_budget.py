"""A memory budget: the bytes that one replica holds of all its requests, and when another one may begin."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Final, Protocol

LATEST: Final = 8
"""What a request is expected to hold is about the mean of as many that ended."""


class Holder(Protocol):
    """A request's log."""

    @property
    def num_bytes(self) -> int: ...


class MemoryBudget:
    """Counts bytes of logs, of inboxes, and of rows on their way. Those that run go on; new ones wait at `most_bytes`.

    A request that has begun counts as what requests hold here usually, until it holds more or its log is whole: many
    that begin at once would find an empty replica.
    """

    def __init__(self, most_bytes: float = math.inf) -> None:
        self._most_bytes = most_bytes
        self.held_bytes = 0
        self._usual_bytes = 0.0
        self._at_work: set[Holder] = set()
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    def hold(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes
        self._changed.set()

    @contextlib.asynccontextmanager
    async def taken(self, log: Holder) -> AsyncIterator[None]:
        """Open while the request is worked on; opens once there is room for it, in turn."""
        async with self._turn:
            while not self._has_room():
                self._changed.clear()
                await self._changed.wait()
            self._at_work.add(log)
        try:
            yield
            self._usual_bytes += (log.num_bytes - self._usual_bytes) / LATEST
        finally:
            self._at_work.discard(log)
            self._changed.set()

    def _has_room(self) -> bool:
        """One that would be alone always has: its own bound is lower."""
        expected = self.held_bytes + sum(max(0.0, self._usual_bytes - log.num_bytes) for log in self._at_work)
        return not expected or expected + max(1.0, self._usual_bytes) <= self._most_bytes
