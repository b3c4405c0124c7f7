"""Continuous batching of diffusion jobs: at each step of the model jobs join, go on, pause or leave."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from omni_cluster.config.schema import DiffusionConfig
from omni_cluster.engine.playback import Playback
from omni_cluster.engine.step_scheduler import Scheduler
from omni_cluster.engine.streams import Streams
from omni_cluster.models.family import DiffusionJob, DiffusionSession

MOST_JOBS = 2
"""Of one request that are made at once, or made and not taken: the second begins a step after the first, with codes
that came meanwhile, so that a player with one short piece does not wait for all of the next one's steps."""
Call = Callable[..., Awaitable[Any]]
"""Calls a method of the `DiffusionModel`, which runs elsewhere, by its name."""


class LoopJob:
    """A job, when its sound is due on the clock of `time.monotonic`, and where its waveform will be.

    `latest` gives the job as it can be by now: it may grow until it is begun, which it is once it has a `number`.
    `before`: the stream's job before it, while that is made.
    """

    def __init__(
        self,
        job: DiffusionJob,
        due_s: float,
        latest: Callable[[], DiffusionJob],
        steps_left: int,
        before: LoopJob | None = None,
    ) -> None:
        self.job, self.due_s, self.latest, self.steps_left, self.before = job, due_s, latest, steps_left, before
        self.done: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self.begun = asyncio.Event()
        self.number: int | None = None

    @property
    def frames(self) -> int:
        return self.job.frames

    @property
    def is_begun(self) -> bool:
        return self.number is not None

    @property
    def may_advance(self) -> bool:
        """At each step it needs what the job before it made there, in an earlier step."""
        before = self.before
        return self.steps_left > 0 and (before is None or before.done.done() or before.steps_left < self.steps_left)

    @property
    def may_finish(self) -> bool:
        """Its sound begins where that of the job before it ends."""
        return self.is_begun and not self.steps_left and (self.before is None or self.before.done.done())

    def begin(self, number: int) -> None:
        self.number = number
        if self.before is not None:
            self.before.before = None  # it is done, for this is the second after it
        self.begun.set()

    def fail(self, error: Exception) -> None:
        self.begun.set()
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # who asked may have left with the error of the job before


class JobLine:
    """The jobs of one request in their order, from who asks for them to who takes their sound; `MOST_JOBS` at most."""

    def __init__(self) -> None:
        self._asked: asyncio.Queue[LoopJob | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(MOST_JOBS)
        self._jobs: list[LoopJob] = []
        self._filling: asyncio.Task[None] | None = None

    async def room(self) -> None:
        """Until one more may be put."""
        await self._room.acquire()

    def put(self, job: LoopJob) -> None:
        self._jobs.append(job)
        self._asked.put_nowait(job)

    async def made(self) -> None:
        """Until all that was put is made or given up."""
        if open_jobs := [job.done for job in self._jobs if not job.done.done()]:
            await asyncio.wait(open_jobs)

    @contextlib.asynccontextmanager
    async def filled_by(self, work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """However the context ends, what is in the line is given up then, and nobody fills it."""
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
        """Each job with its sound, until there are no more; raises then what ended the filling."""
        while (asked := await self._asked.get()) is not None:
            samples = await asked.done  # a caller that is cancelled cancels this, and the loop drops the job
            self._jobs.remove(asked)
            yield asked.job, samples
            self._room.release()
        if self._filling is not None:
            self._filling.result()


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
        """The sound of one request, job by job; a job may begin while the one before it is made."""
        playback, line = Playback(), JobLine()
        async with line.filled_by(self._ask_all(session, playback, line)):
            async for job, samples in line.sounds():
                self._frame_s = len(samples) / self._sample_rate_hz / heard_frames(job)
                playback.deliver(len(samples) / self._sample_rate_hz, time.monotonic())
                yield samples

    async def _ask_all(self, session: DiffusionSession, playback: Playback, line: JobLine) -> None:
        """Asks for each job once it can be made and the one before it is begun, until all are made."""
        before: LoopJob | None = None
        async with contextlib.AsyncExitStack() as cleanup:
            jobs = await cleanup.enter_async_context(_closing(session.jobs()))
            await line.room()
            async for job in jobs:
                if job.stream is not None and job.start == 0:
                    await cleanup.enter_async_context(self._streams.one_more(job.stream))
                    cleanup.push_async_callback(line.made)  # until then the stream keeps its place
                before = self._ask(job, playback, session, before)
                line.put(before)
                await before.begun.wait()
                await line.room()

    def _ask(self, job: DiffusionJob, playback: Playback, session: DiffusionSession, before: LoopJob | None) -> LoopJob:
        if self._has_ended:
            raise self._stopped()
        before = None if before is None or before.done.done() else before
        ahead_s = 0.0 if before is None else heard_frames(before.job) * self._frame_s
        asked = LoopJob(job, self._due_s(job, playback) + ahead_s, session.latest, self._steps, before)
        self._jobs.append(asked)
        self._work.set()
        return asked

    def _due_s(self, job: DiffusionJob, playback: Playback) -> float:
        """A whole answer may take as long as it sounds: its client waits anyway, and others hear theirs already."""
        now_s = time.monotonic()
        return now_s + job.frames * self._frame_s if job.stream is None else playback.due_s(now_s)

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
        unfinished = [job for job in self._jobs if job.may_advance]
        for job in unfinished:
            if not job.is_begun:
                job.job = job.latest()
        chosen = [job for job in self._scheduler.choose(unfinished) if job.is_begun or await self._begin(job)]
        if chosen:
            await self._step(chosen)
        ended = [job for job in self._jobs if job.may_finish]
        if to_finish := self._scheduler.to_finish(ended, any(job.steps_left for job in self._jobs)):
            await self._finish(to_finish)
        elif not chosen:
            await asyncio.sleep(0)  # nobody's turn: let those whose jobs are done take note of it

    async def _begin(self, job: LoopJob) -> bool:
        """Whether it could be begun; one that cannot fails alone."""
        number = next(self._numbers)
        try:
            await self._call("begin", number, job.job)
        except Exception as error:  # a boundary: the job's request gets the error, the stage goes on
            job.fail(error)
            self._jobs.remove(job)
            return False
        job.begin(number)
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


def heard_frames(job: DiffusionJob) -> float:
    return job.frames * (1 - job.look_ahead / len(job.codes))


@contextlib.asynccontextmanager
async def _closing(jobs: AsyncIterator[DiffusionJob]) -> AsyncIterator[AsyncIterator[DiffusionJob]]:
    try:
        yield jobs
    finally:
        if isinstance(jobs, AsyncGenerator):
            await jobs.aclose()
