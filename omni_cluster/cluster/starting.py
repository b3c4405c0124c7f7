"""What a replica does until it serves, in its log and published for the demo, and what it runs beside its requests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Coroutine, Iterator
from typing import Any

from omni_cluster.cluster.serve_private import kv_get, kv_list, kv_put

logger = logging.getLogger("ray.serve")

NAMESPACE = b"omni_cluster"
"""Of Ray's own store of keys and values, which is there before any replica."""
PREFIX = b"starting/"
READY = "ready"
"""What a deployment says when it serves."""


@contextlib.contextmanager
def start_step(stage: str, what: str) -> Iterator[None]:
    """One step of a replica's start, published as it begins, with its time in the log when it ends.

    Of the replicas of a stage, the last to begin a step shows.
    """
    logger.info("%s: %s", stage, what)
    kv_put(PREFIX + stage.encode(), what.encode(), namespace=NAMESPACE)
    began_s = time.monotonic()
    yield
    logger.info("%s: %s took %.1f s", stage, what, time.monotonic() - began_s)


def end_start(stage: str) -> None:
    """The start is over. What was made until now stays, so later garbage collections skip it."""
    gc.freeze()
    kv_put(PREFIX + stage.encode(), READY.encode(), namespace=NAMESPACE)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Imports make a million objects, none of them garbage; looking for garbage takes a quarter of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def steps_now() -> dict[str, str]:
    """The last step that a replica of each stage of this cluster began, or READY."""
    steps = {}
    for key in kv_list(PREFIX, namespace=NAMESPACE):
        said = kv_get(key, namespace=NAMESPACE)
        if said is not None:
            steps[key.removeprefix(PREFIX).decode()] = said.decode()
    return steps


def run_until_closed(work: Coroutine[Any, Any, None], closing: contextlib.AsyncExitStack) -> None:
    """Runs the work as a task, which the stack ends."""
    closing.push_async_callback(_ended, asyncio.create_task(work))


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    (error,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(error, Exception):
        logger.error("what ran beside the requests had broken", exc_info=error)
