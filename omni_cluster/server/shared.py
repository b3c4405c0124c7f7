"""Answers that are costly to make, made once for all who ask meanwhile."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """The last answer while at most `fresh_s` old, or `stale_s` while the next is made: once, for all who ask."""

    def __init__(
        self, make: Callable[[], Awaitable[T]], *, fresh_s: float = 0, stale_s: float = 0, wait_s: float
    ) -> None:
        self._make = make
        self._fresh_s = fresh_s
        self._stale_s = stale_s
        self._wait_s = wait_s
        self._making: asyncio.Task[T] | None = None
        self._made: tuple[float, T] | None = None

    async def get(self) -> T:
        """Raises TimeoutError after `wait_s`, and what making it raised. What takes longer goes on, alone."""
        age_s = math.inf if self._made is None else time.monotonic() - self._made[0]
        if self._made is not None and age_s < self._fresh_s:
            return self._made[1]
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._remade())
            self._making.add_done_callback(_heed)
        if self._made is not None and age_s < self._stale_s:
            return self._made[1]
        async with asyncio.timeout(self._wait_s):
            return await asyncio.shield(self._making)

    async def _remade(self) -> T:
        began_s = time.monotonic()
        answer = await self._make()
        self._made = began_s, answer
        return answer


def _heed(making: asyncio.Task[T]) -> None:
    """Nobody may wait for it any more: asyncio would log its error as one that was lost."""
    if not making.cancelled():
        making.exception()
