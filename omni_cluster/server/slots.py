"""How many requests one ingress works on at once, and how many wait for that."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final

from omni_cluster.openai_api.errors import BadRequest

LATEST: Final = 8
"""Slots given back that the mean interval is of, by which a client is said when to come again."""
MOST_RETRY_S: Final = 60.0


class AdmissionSlots:
    """Admission slots: `most` may be taken, `most_waiting` requests wait for one in order, others are refused.

    So are those that would wait longer than `max_wait_s`, by how often a slot was given back of late, and those that
    have waited so long.
    """

    def __init__(
        self,
        most: int,
        most_waiting: int,
        max_wait_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._most_waiting = most_waiting
        self._max_wait_s = max_wait_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.taken = 0
        self._clock = clock
        self._freed_s: float | None = None
        self._interval_s: float | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def take(self) -> None:
        """Waits for a slot, which the caller gives back. Raises BadRequest, 429, as `check_room` does."""
        if self.taken < self._most:
            self.taken += 1
            return
        self.check_room()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._max_wait_s):
                await turn
        except asyncio.CancelledError:
            self._leave(turn)
            raise
        except TimeoutError:
            self._leave(turn)
            raise self._refused(
                f"{self._most} requests run, and none of their slots was free within max_wait_s = {self._max_wait_s:g}"
            ) from None

    def check_room(self) -> None:
        """Raises BadRequest, 429, if one more could neither be worked on nor wait, or would wait too long."""
        if self.taken < self._most:
            return
        if len(self._waiting) >= self._most_waiting:
            raise self._refused(f"{self._most} requests run and {self._most_waiting} wait, which is as many as may")
        if self._max_wait_s is not None and (wait_s := self._wait_s or 0.0) > self._max_wait_s:
            raise self._refused(
                f"{self._most} requests run, and a further one would wait {wait_s:.2g} s, longer than max_wait_s = "
                f"{self._max_wait_s:g}"
            )

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        await self.take()
        try:
            yield
        finally:
            self.give_back()

    def give_back(self) -> None:
        """Passes the slot to the first that waits."""
        self._learn()
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.taken -= 1

    def _learn(self) -> None:
        """How often a slot is given back while all are taken."""
        if self.taken < self._most:
            self._freed_s = None
            return
        now_s = self._clock()
        if self._freed_s is not None:
            passed_s = now_s - self._freed_s
            known_s = passed_s if self._interval_s is None else self._interval_s
            self._interval_s = known_s + (passed_s - known_s) / LATEST
        self._freed_s = now_s

    def _leave(self, turn: asyncio.Future[None]) -> None:
        if not turn.cancelled():
            self.give_back()  # the slot came at the moment of the cancellation
        elif turn in self._waiting:
            self._waiting.remove(turn)

    @property
    def _wait_s(self) -> float | None:
        """Until one more would have a slot, by how often one was given back of late."""
        return None if self._interval_s is None else self._interval_s * (1 + len(self._waiting))

    def _refused(self, why: str) -> BadRequest:
        """Come again when those that wait now will have begun."""
        wait_s = None if self._wait_s is None else min(MOST_RETRY_S, self._wait_s)
        return BadRequest(f"{why}; send it again later.", code="too_many_requests", status=429, retry_after_s=wait_s)
