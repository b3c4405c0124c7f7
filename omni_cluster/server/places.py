"""How many requests one ingress works on at once, and how many wait for that."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from omni_cluster.openai_api.errors import BadRequest


class Places:
    """At most `most` are taken; `most_waiting` requests wait for one, in the order they came; others are refused."""

    def __init__(self, most: int, most_waiting: int) -> None:
        self._most = most
        self._most_waiting = most_waiting
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.taken = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def take(self) -> None:
        """Waits for a place, which the caller gives back. Raises BadRequest, 429, if `most_waiting` wait already."""
        if self.taken < self._most:
            self.taken += 1
            return
        if len(self._waiting) >= self._most_waiting:
            raise self._full()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            self._leave(turn)
            raise

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        await self.take()
        try:
            yield
        finally:
            self.give_back()

    def give_back(self) -> None:
        """Passes the place to the first that waits."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.taken -= 1

    def _leave(self, turn: asyncio.Future[None]) -> None:
        if not turn.cancelled():
            self.give_back()  # the place came at the moment of the cancellation
        elif turn in self._waiting:
            self._waiting.remove(turn)

    def _full(self) -> BadRequest:
        return BadRequest(
            f"{self._most} requests run and {self._most_waiting} wait, which is as many as may; send it again later.",
            code="too_many_requests",
            status=429,
        )
