"""A cache with single flight: what is costly to make is made once for all calls that wait for it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CachedAnswer(Generic[T]):
    """An answer; it is as old as its making's beginning."""

    answer: T
    began_s: float
    took_s: float


class SingleFlightCache(Generic[T]):
    """The last answer while it is fresh, or at most `stale_s` old while the next is made: once, for all calls.

    Fresh: at most `fresh_s` after its making began, and at most `fresh_times` as long after its end as that took. So,
    however often it is asked for, making what takes little takes one part in `1 + fresh_times` of the time at most.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[T]],
        *,
        fresh_s: float = 0,
        fresh_times: float = math.inf,
        stale_s: float = 0,
        wait_s: float,
    ) -> None:
        self._make = make
        self._fresh_s = fresh_s
        self._fresh_times = fresh_times
        self._stale_s = stale_s
        self._wait_s = wait_s
        self._making: asyncio.Task[T] | None = None
        self._made: CachedAnswer[T] | None = None

    async def get(self) -> T:
        """Raises TimeoutError after `wait_s`, and what making it raised. What takes longer goes on, alone."""
        made = self._made
        if made is not None and _age_s(made) < min(self._fresh_s, made.took_s * (1 + self._fresh_times)):
            return made.answer
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._remade())
            self._making.add_done_callback(_heed)
        if made is not None and _age_s(made) < self._stale_s:
            return made.answer
        async with asyncio.timeout(self._wait_s):
            return await asyncio.shield(self._making)

    async def _remade(self) -> T:
        began_s = _now_s()
        answer = await self._make()
        self._made = CachedAnswer(answer, began_s, _now_s() - began_s)
        return answer


def _now_s() -> float:
    return time.monotonic()


def _age_s(made: CachedAnswer[Any]) -> float:
    return _now_s() - made.began_s


def _heed(making: asyncio.Task[T]) -> None:
    """Reads its error: asyncio would log one that no call waits for any more as lost."""
    if not making.cancelled():
        making.exception()
