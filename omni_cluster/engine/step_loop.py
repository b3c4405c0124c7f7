"""Continuous batching of diffusion jobs: at each step of the model jobs join, go on, pause or leave."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from omni_cluster.config.schema import DiffusionConfig
from omni_cluster.engine.playback import Playback
from omni_cluster.engine.step_scheduler import Scheduler
from omni_cluster.engine.streams import Streams
from omni_cluster.models.family import DiffusionJob, DiffusionSession

Call = Callable[..., Awaitable[Any]]
"""Calls a method of the `DiffusionModel`, which runs elsewhere, by its name."""


@dataclass(slots=True, eq=False)
class LoopJob:
    """A job, when its sound is due on the clock of `time.monotonic`, and where its waveform will be.

    `latest` gives the job as it can be by now: it may grow until it is begun, which it is once it has a `number`.
    """

    job: DiffusionJob
    due_s: float
    done: asyncio.Future[np.ndarray]
    latest: Callable[[], DiffusionJob]
    steps_left: int
    number: int | None = None

    @property
    def frames(self) -> int:
        return self.job.frames

    @property
    def is_begun(self) -> bool:
        return self.number is not None

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class StepLoop:
    """The jobs of one model, from when they are asked for until their sound is made.

    `call` is used by one caller at a time. `steps`: of every job. `stopped` makes what those get who still wait when
    the loop ends.
    """

    def __init__(
        self,
        call: Call,
        steps: int,
        sample_rate_hz: int,
        config: DiffusionConfig,
        scheduler: Scheduler[LoopJob],
        stopped: Callable[[], Exception],
    ) -> None:
        self._call, self._steps, self._sample_rate_hz = call, steps, sample_rate_hz
        self._config, self._scheduler, self._stopped = config, scheduler, stopped
        self._numbers = itertools.count()
        self._jobs: list[LoopJob] = []
        self._work = asyncio.Event()
        self._streams = Streams(config.max_streams, self._work.set)
        self._frame_s = 0.0  # what a frame sounds for; known once a job was made
        self._has_ended = False
        self.steps_made = 0

    async def waveforms(self, session: DiffusionSession) -> AsyncGenerator[np.ndarray, None]:
        """The sound of one request, job by job."""
        playback = Playback()
        async with contextlib.AsyncExitStack() as cleanup:
            jobs = await cleanup.enter_async_context(_closing(session.jobs()))
            async for job in jobs:
                due_s = self._due_s(job, playback)
                if job.stream is not None and job.start == 0:
                    await cleanup.enter_async_context(self._streams.one_more(job.stream))
                samples = await self._made(job, due_s, session.latest)
                playback.deliver(len(samples) / self._sample_rate_hz, time.monotonic())
                yield samples

    def _due_s(self, job: DiffusionJob, playback: Playback) -> float:
        """A whole answer may take as long as it sounds: its client waits anyway, and others hear theirs already."""
        now_s = time.monotonic()
        return now_s + job.frames * self._frame_s if job.stream is None else playback.due_s(now_s)

    async def _made(self, job: DiffusionJob, due_s: float, latest: Callable[[], DiffusionJob]) -> np.ndarray:
        if self._has_ended:
            raise self._stopped()
        asked = LoopJob(job, due_s, asyncio.get_running_loop().create_future(), latest, self._steps)
        self._jobs.append(asked)
        self._work.set()
        samples = await asked.done  # a caller that is cancelled cancels this, and the loop drops the job
        made = asked.job
        heard = 1 - made.look_ahead / len(made.codes)
        self._frame_s = len(samples) / self._sample_rate_hz / (made.frames * heard)
        return samples

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                await self._work.wait()
                await self._let_others_join()
                self._work.clear()
                await self._leave()
                while self._jobs:
                    await self._advance()
                    await self._leave()
        finally:
            self._has_ended = True
            for job in self._jobs:
                job.fail(self._stopped())
            self._jobs = []

    async def _let_others_join(self) -> None:
        """An idle model waits a moment: jobs that come together run together."""
        if len(self._jobs) < self._config.max_batch_size:
            await asyncio.sleep(self._config.max_wait_ms / 1000)

    async def _leave(self) -> None:
        """Between two steps: jobs whose callers were cancelled, then streams that have ended."""
        gone = [job for job in self._jobs if job.done.done()]
        self._jobs = [job for job in self._jobs if not job.done.done()]
        await self._drop(gone)
        while ended := self._streams.ended():
            await self._call("forget", ended)
            self._streams.forgotten(len(ended))

    async def _advance(self) -> None:
        """One step of the jobs that need it most, and the sound of those that it was the last one for."""
        unfinished = [job for job in self._jobs if job.steps_left]
        for job in unfinished:
            if not job.is_begun:
                job.job = job.latest()
        chosen = [job for job in self._scheduler.choose(unfinished) if job.is_begun or await self._begin(job)]
        if chosen:
            await self._step(chosen)
        ended = [job for job in self._jobs if job.is_begun and not job.steps_left]
        if to_finish := self._scheduler.to_finish(ended, any(job.steps_left for job in self._jobs)):
            await self._finish(to_finish)

    async def _begin(self, job: LoopJob) -> bool:
        """Whether it could be begun; one that cannot fails alone."""
        number = next(self._numbers)
        try:
            await self._call("begin", number, job.job)
        except Exception as error:  # a boundary: the job's request gets the error, the stage goes on
            job.fail(error)
            self._jobs.remove(job)
            return False
        job.number = number
        return True

    async def _step(self, chosen: Sequence[LoopJob]) -> None:
        try:
            time = await self._call("step", [job.number for job in chosen])
        except Exception as error:  # a boundary; what a step that broke has changed cannot be told
            await self._give_up(chosen, error)
            return
        self.steps_made += 1
        for job in chosen:
            job.steps_left -= 1
        if time is not None:
            self._scheduler.took(time)

    async def _finish(self, jobs: Sequence[LoopJob]) -> None:
        """Those that break fail alone: what could not be finished together is finished one by one."""
        try:
            waves = await self._call("finish", [job.number for job in jobs])
        except Exception as error:  # a boundary
            if len(jobs) == 1:
                await self._give_up(jobs, error)
            for job in jobs if len(jobs) > 1 else ():
                await self._finish([job])
            return
        self._jobs = [job for job in self._jobs if job not in jobs]
        for job, wave in zip(jobs, waves, strict=True):
            if not job.done.done():
                job.done.set_result(wave)

    async def _give_up(self, jobs: Sequence[LoopJob], error: Exception) -> None:
        for job in jobs:
            job.fail(error)
        self._jobs = [job for job in self._jobs if job not in jobs]
        await self._drop(jobs)

    async def _drop(self, jobs: Sequence[LoopJob]) -> None:
        if numbers := [job.number for job in jobs if job.is_begun]:
            await self._call("drop", numbers)

    def counts(self) -> dict[str, int]:
        """`streams`: those whose state the model may hold."""
        running = sum(job.is_begun for job in self._jobs)
        waiting = sum(not job.is_begun and not job.done.done() for job in self._jobs)
        return {"running": running, "waiting": waiting + self._streams.waiting, "streams": len(self._streams)}


@contextlib.asynccontextmanager
async def _closing(jobs: AsyncIterator[DiffusionJob]) -> AsyncIterator[AsyncIterator[DiffusionJob]]:
    try:
        yield jobs
    finally:
        if isinstance(jobs, AsyncGenerator):
            await jobs.aclose()
