"""Tasks that run beside a replica's requests until it ends."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger("ray.serve")


class Loose:
    """Tasks that nothing waits for, kept until they end; each in a context of its own, as it outlives its request."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def run_until_closed(work: Coroutine[Any, Any, None], closing: contextlib.AsyncExitStack) -> None:
    """Runs the work as a task, which the stack ends."""
    closing.push_async_callback(_ended, asyncio.create_task(work))


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    (error,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(error, Exception):
        logger.error("what ran beside the requests had broken", exc_info=error)
