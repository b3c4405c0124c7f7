"""The jobs of one request, between the task that asks for them and the one that takes their sound."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import numpy as np

from omni_cluster.engine.loop_job import LoopJob
from omni_cluster.models.family import DiffusionJob


class JobQueue:
    """Jobs in order. At most `most_jobs` of them are being made, or are made and not taken yet."""

    def __init__(self, most_jobs: int) -> None:
        self._asked: asyncio.Queue[LoopJob | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(most_jobs)
        self._jobs: list[LoopJob] = []
        self._filling: asyncio.Task[None] | None = None

    async def room(self) -> None:
        """Waits until one more job may be put."""
        await self._room.acquire()

    def put(self, job: LoopJob) -> None:
        self._jobs.append(job)
        self._asked.put_nowait(job)

    async def made(self) -> None:
        """Waits until every job that was put is made or given up."""
        if open_jobs := [job.done for job in self._jobs if not job.done.done()]:
            await asyncio.wait(open_jobs)

    @contextlib.asynccontextmanager
    async def filled_by(self, work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Runs `work`, which fills the queue; at the context's end cancels it, and all jobs in the queue."""
        self._filling = asyncio.create_task(work)
        self._filling.add_done_callback(lambda _: self._asked.put_nowait(None))
        try:
            yield
        finally:
            for job in self._jobs:
                job.done.cancel()
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)

    async def sounds(self) -> AsyncIterator[tuple[DiffusionJob, np.ndarray]]:
        """Yields each job with its sound, until there are no more. Then raises what `work` raised, if it did."""
        while (asked := await self._asked.get()) is not None:
            samples = await asked.done  # a caller that is cancelled cancels this, and the loop drops the job
            self._jobs.remove(asked)
            yield asked.job, samples
            self._room.release()
        if self._filling is not None:
            self._filling.result()
