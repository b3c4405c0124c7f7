"""Jobs of a sound stage on their way through the steps of its model, and the streams that they belong to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import numpy as np

from omni_cluster.models.sound import SoundJob
from omni_cluster.types.errors import JobFailed


class LoopJob:
    """A job, the time (`time.monotonic`) at which its sound is due, and the future of its waveform.

    `latest` returns the job at its present size: it may grow until it begins, which gives it a `number`.
    `steps`: of each of its parts. `before`: the stream's previous job, while that is being made.
    """

    def __init__(
        self,
        job: SoundJob,
        due_s: float,
        latest: Callable[[], SoundJob],
        steps: int,
        before: LoopJob | None = None,
    ) -> None:
        self.job, self.due_s, self.latest, self.steps_left, self.before = job, due_s, latest, steps * job.parts, before
        self.done: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self.begun = asyncio.Event()
        self.number: int | None = None

    @property
    def size(self) -> int:
        return self.job.size

    @property
    def is_begun(self) -> bool:
        return self.number is not None

    @property
    def samples_before(self) -> int:
        """Those that are heard of the jobs before it that are still made."""
        if self.before is None or not self.follows:
            return 0
        return len(self.before.job.samples) * self.before.job.is_heard + self.before.samples_before

    @property
    def is_left(self) -> bool:
        """It failed, or its caller left.

        Its stream may be forgotten by now, and the model would begin it anew for this job, for ever.
        """
        return self.done.done()

    @property
    def follows(self) -> bool:
        """The job before it is still being made."""
        return self.before is not None and not self.before.done.done()

    @property
    def may_advance(self) -> bool:
        """Each of its steps needs what the job before it made in that step, earlier."""
        is_behind = self.before is None or not self.follows or self.before.steps_left < self.steps_left
        return self.steps_left > 0 and is_behind and not self.is_left

    @property
    def may_finish(self) -> bool:
        """Its sound begins where that of the job before it ends."""
        return self.is_begun and not self.steps_left and not self.follows and not self.is_left

    def grow(self) -> None:
        """Takes in the codes that came since it was asked for, unless it has begun."""
        if not self.is_begun:
            self.job = self.latest()

    def begin(self, number: int) -> None:
        self.number = number
        self.begun.set()

    def make(self, samples: np.ndarray) -> None:
        """Its sound is made. Fails the job if that has another length than the job states."""
        if len(samples) != len(self.job.samples):
            self.fail(JobFailed(f"a job of {len(self.job.samples)} samples of sound was given {len(samples)}."))
        self.before = None  # it is made, and would keep all before it
        if not self.done.done():
            self.done.set_result(samples)

    def fail(self, error: Exception) -> None:
        self.begun.set()
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # marks it as seen: the caller may have left with an earlier job's error


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

    async def sounds(self) -> AsyncIterator[tuple[SoundJob, np.ndarray]]:
        """Yields each job with its sound, until there are no more. Then raises what `work` raised, if it did."""
        while (asked := await self._asked.get()) is not None:
            samples = await asked.done  # a caller that is cancelled cancels this, and the loop drops the job
            self._jobs.remove(asked)
            self._room.release()
            yield asked.job, samples
        if self._filling is not None:
            self._filling.result()


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
