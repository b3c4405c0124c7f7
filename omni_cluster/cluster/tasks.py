"""Tasks that run beside a replica's requests until it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger("ray.serve")


def run_until_closed(work: Coroutine[Any, Any, None], closing: contextlib.AsyncExitStack) -> None:
    """Runs the work as a task, which the stack ends."""
    closing.push_async_callback(_ended, asyncio.create_task(work))


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    (error,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(error, Exception):
        logger.error("what ran beside the requests had broken", exc_info=error)
