"""A process of a batch: tables of rows in, tables of answers out."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import pyarrow

from omni_cluster.batch.answer import table_of
from omni_cluster.batch.client import RowClient
from omni_cluster.batch.limits import BatchLimits
from omni_cluster.batch.sources import Source

T = TypeVar("T")


class Answering:
    """Answers blocks of rows, several at once: Ray Data calls it from a thread for each."""

    def __init__(self, source: Source, limits: BatchLimits) -> None:
        """Returns once the source is there, or cannot be: Ray Data would make a process that raises here anew."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="batch", daemon=True)
        self._thread.start()
        self._opened = AsyncExitStack()
        self._client = self._begun(self._open(source, limits))
        wait([self._client])

    async def _open(self, source: Source, limits: BatchLimits) -> RowClient:
        http = await self._opened.enter_async_context(source.opened(limits))
        return await RowClient.found(http, limits)

    def __call__(self, rows: pyarrow.Table) -> pyarrow.Table:
        """Raises ApplicationLost, BatchError, and ConfigError of own engines, which end the batch."""
        client = self._client.result()
        return table_of(self._begun(client.answers(rows.to_pylist())).result())

    def close(self) -> None:
        """Ends engines of its own; safe to call twice."""
        if self._loop.is_running():
            self._begun(self._opened.aclose()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __del__(self) -> None:
        # Ray Data has no other word for the end of a process that it ends in order.
        if not sys.is_finalizing():  # or the loop's thread is gone already
            self.close()

    def _begun(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)
