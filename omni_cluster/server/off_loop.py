"""Work that takes too long for an event loop, in threads, one call after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class OffLoop:
    """The calls of one stream, each awaited before the next. `closes` frees what they use, never while one runs."""

    def __init__(self, threads: ThreadPoolExecutor, closes: Callable[[], None]) -> None:
        self._threads = threads
        self._closes = closes
        self._running: Future[Any] | None = None

    async def run(self, work: Callable[[], T]) -> T:
        future = self._threads.submit(work)
        self._running = future
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Closes at once or, if the caller left during a call, as soon as that call returns."""
        if self._running is None:
            self._closes()
        else:
            self._running.add_done_callback(lambda _: self._closes())
