"""Answers that are costly to make, made once for all who ask meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """The last answer while it is at most `fresh_s` old, else the next: of many who wait for it, one has it made."""

    def __init__(self, make: Callable[[], Awaitable[T]], *, fresh_s: float, wait_s: float) -> None:
        self._make = make
        self._fresh_s = fresh_s
        self._wait_s = wait_s
        self._making: asyncio.Task[T] | None = None
        self._made: tuple[float, T] | None = None

    async def get(self) -> T:
        """Raises TimeoutError after `wait_s`, and what making it raised. What takes longer goes on, alone."""
        if self._made is not None and time.monotonic() - self._made[0] < self._fresh_s:
            return self._made[1]
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._remade())
        async with asyncio.timeout(self._wait_s):
            return await asyncio.shield(self._making)

    async def _remade(self) -> T:
        began_s = time.monotonic()
        answer = await self._make()
        self._made = began_s, answer
        return answer
