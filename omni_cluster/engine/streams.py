"""The streams whose state a diffusion model may hold."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


class Streams:
    """Counts the streams that run, and those that ended and that the model has not forgotten yet."""

    def __init__(self, max_streams: int, on_end: Callable[[], None]) -> None:
        self._free = asyncio.Semaphore(max_streams)
        self._on_end = on_end
        self._running = 0
        self._ended: list[str] = []
        self.waiting = 0

    @contextlib.asynccontextmanager
    async def one_more(self, stream: str) -> AsyncIterator[None]:
        """Waits for a place, which is free again when the context is left.

        The stream may still be in the model then; it is forgotten before the next step, which may begin another.
        """
        await self._wait_for_place()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._ended.append(stream)
            self._free.release()
            self._on_end()

    async def _wait_for_place(self) -> None:
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1

    def ended(self) -> list[str]:
        return list(self._ended)

    def forgotten(self, count: int) -> None:
        """The model has forgotten the `count` streams that ended first."""
        del self._ended[:count]

    def __len__(self) -> int:
        return self._running + len(self._ended)
