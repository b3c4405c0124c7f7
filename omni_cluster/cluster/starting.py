"""What a replica does until it serves, in its log and published for the demo, and what it runs beside its requests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Coroutine, Iterator
from typing import Any

from omni_cluster.cluster.serve_private import kv_delete, kv_get, kv_list, kv_put

logger = logging.getLogger("ray.serve")

NAMESPACE = b"omni_cluster"
"""Of Ray's own store of keys and values, which is there before any replica."""
PREFIX = b"starting/"


class Starting:
    """The steps of one replica's start, each published as it begins. Of a stage's replicas the last one shows."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._key = PREFIX + stage.encode()

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """One step; its time is in the log when it ends."""
        logger.info("%s: %s", self._stage, what)
        kv_put(self._key, what.encode(), namespace=NAMESPACE)
        began_s = time.monotonic()
        yield
        logger.info("%s: %s took %.1f s", self._stage, what, time.monotonic() - began_s)

    def ended(self) -> None:
        """The start is over. What was made until now stays, so later garbage collections skip it."""
        gc.freeze()
        kv_delete(self._key, namespace=NAMESPACE)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Imports make a million objects, none of them garbage; looking for garbage takes a quarter of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def steps_now() -> dict[str, str]:
    """The step of each stage of this cluster that starts, or broke off while it did."""
    steps = {}
    for key in kv_list(PREFIX, namespace=NAMESPACE):
        said = kv_get(key, namespace=NAMESPACE)
        if said is not None:  # else it has ended meanwhile
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
