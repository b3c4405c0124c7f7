"""Continuous batching of sound jobs: at each step of the model jobs join, go on, pause or leave."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from omni_cluster.config.sound_options import SoundOptions
from omni_cluster.engine.playback import Playback
from omni_cluster.engine.sound.jobs import JobQueue, LoopJob, Streams
from omni_cluster.engine.sound.playout import PlayoutDelay
from omni_cluster.engine.sound.scheduler import Slack, StepScheduler
from omni_cluster.models.progress import Progress
from omni_cluster.models.sound import SoundJob, SoundSession, StepTime
from omni_cluster.types.errors import OmniError, SoundEngineStopped

logger = logging.getLogger(__name__)

Call = Callable[..., Awaitable[Any]]
"""Calls a method of the `SoundModel`, which runs elsewhere, by its name. Raises SoundEngineStopped if no later call can
succeed either, another OmniError if only this one failed."""
COUNTED = ("running", "waiting", "held", "streams")
"""Jobs being made; jobs that wait; jobs of both kinds that follow an unfinished one of their request; streams whose
state the model may hold."""


class StepLoop:
    """The jobs of one model, from when they are asked for until their sound is made.

    `call` is used by one caller at a time. `steps`, `overlaps`: the model's, see `SoundModel`. `stopped` makes the
    error of jobs that still wait when the loop ends. `slack` learns from pieces and passes.
    """

    def __init__(
        self,
        call: Call,
        steps: int,
        sample_rate_hz: int,
        config: SoundOptions,
        scheduler: StepScheduler,
        stopped: Callable[[], SoundEngineStopped],
        slack: Slack,
        *,
        overlaps: bool = False,
    ) -> None:
        self._call, self._steps, self._sample_rate_hz = call, steps, sample_rate_hz
        self._overlaps = overlaps
        self._config, self._scheduler, self._stopped, self._slack = config, scheduler, stopped, slack
        self._numbers = itertools.count()
        self._jobs: list[LoopJob] = []
        self._ending: list[LoopJob] = []
        self._work = asyncio.Event()
        self._streams = Streams(config.max_streams, self._work.set)
        self._has_ended = False
        self._calls = 0

    # ------------------------------------------------------------- one request

    async def waveforms(
        self, session: SoundSession, playback: Playback, playout: PlayoutDelay | None = None
    ) -> AsyncGenerator[tuple[int, np.ndarray], None]:
        """The sound of one request, job by job, for its player; a job may begin while the one before it is made.

        Each with the position of its first sample in the request: a stream may begin in the midst of it. `playout`
        delays the first, and learns from the others.
        """
        queue = JobQueue(self._config.max_pieces_at_once)
        async with queue.filled_by(self._ask_all(session, playback, queue)):
            async for job, samples in queue.sounds():
                if job.is_heard:
                    await self._deliver(self._seconds(len(samples)), playback, playout)
                yield job.samples.start, samples

    async def _deliver(self, sound_s: float, playback: Playback, playout: PlayoutDelay | None) -> None:
        now_s = time.monotonic()
        delay_s = 0.0 if playout is None else playout.of(playback, now_s)
        playback.deliver(sound_s, now_s, delay_s)
        if delay_s:
            await asyncio.sleep(delay_s)

    async def _ask_all(self, session: SoundSession, playback: Playback, queue: JobQueue) -> None:
        """Asks for each job once it can be made and the one before it is begun, until all are made."""
        before: LoopJob | None = None
        async with contextlib.AsyncExitStack() as cleanup:
            jobs = await cleanup.enter_async_context(_closing(session.jobs()))
            await queue.room()
            async for job in jobs:
                if job.stream is not None and before is None:
                    await cleanup.enter_async_context(self._streams.one_more(job.stream))
                    cleanup.push_async_callback(queue.made)  # until then the stream keeps its place
                before = self._ask(job, playback, session, before)
                queue.put(before)
                await before.begun.wait()
                await queue.room()

    def _ask(self, job: SoundJob, playback: Playback, session: SoundSession, before: LoopJob | None) -> LoopJob:
        if self._has_ended:
            raise self._stopped()
        asked = LoopJob(job, self._due_s(job, playback), session.latest, self._steps, before)
        asked.due_s += self._seconds(asked.samples_before)
        self._jobs.append(asked)
        self._work.set()
        return asked

    def _due_s(self, job: SoundJob, playback: Playback) -> float:
        """A whole answer may take as long as it sounds: its client waits anyway, and others hear theirs already."""
        now_s = time.monotonic()
        return now_s + self._seconds(len(job.samples)) if job.stream is None else playback.due_s(now_s)

    def _seconds(self, samples: int) -> float:
        return samples / self._sample_rate_hz

    # ---------------------------------------------------------------- the steps

    async def run(self) -> None:
        """Runs until it is cancelled. Raises SoundEngineStopped when the model can no longer be called."""
        try:
            while True:
                await self._work.wait()
                await self._let_others_join()
                self._work.clear()
                await self._leave()
                while self._jobs:
                    await self._advance()
                    await self._leave()
        except SoundEngineStopped:
            raise
        except Exception:
            logger.exception("the loop of the sound jobs ended by a fault")
            raise
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
        """Between two steps: drops jobs whose callers left, then has the model forget streams that ended."""
        gone = [job for job in self._jobs if job.is_left]
        self._jobs = [job for job in self._jobs if not job.is_left]
        await self._drop(gone)
        while ended := self._streams.ended():
            await self._call("forget", ended)
            self._streams.forgotten(len(ended))

    async def _advance(self) -> None:
        """Makes one step of the most urgent jobs, and finishes jobs that have had all their steps.

        Where a model `overlaps`, their sound begins with a step and is read behind the next one: the device has work
        meanwhile.
        """
        unfinished = [job for job in self._jobs if job.may_advance]
        for job in unfinished:
            job.grow()
        chosen = [job for job in self._scheduler.choose(unfinished) if job.is_begun or await self._begin(job)]
        ending, self._ending = [job for job in self._ending if not job.is_left], []
        is_beside = self._overlaps and bool(chosen)
        self._ending = self._to_finish() if is_beside and not ending else []
        if chosen:
            await self._step(chosen, self._ending)
        if to_finish := ending if is_beside else ending or self._to_finish():
            await self._finish(to_finish)
        elif not chosen:
            await asyncio.sleep(0)  # no job could advance: lets the callers of finished jobs run

    def _to_finish(self) -> list[LoopJob]:
        ended = [job for job in self._jobs if job.may_finish]
        return self._scheduler.to_finish(ended, any(job.steps_left for job in self._jobs))

    async def _begin(self, job: LoopJob) -> bool:
        """Begins the job. Returns False if that failed; then only this job fails."""
        number = next(self._numbers)
        _, error = await self._tried("begin", number, job.job)
        if error is not None:
            await self._give_up(job, error)
            return False
        job.begin(number)
        if job.job.stream is not None:
            self._slack.began(job.size, job.due_s - time.monotonic())
        return True

    async def _step(self, jobs: Sequence[LoopJob], ending: Sequence[LoopJob] = ()) -> None:
        taken, error = await self._tried("step", [job.number for job in jobs], [job.number for job in ending])
        if error is not None:
            # What ends may be what broke: then these jobs' step is made without it.
            await (self._step(jobs) if ending else self._one_by_one(self._step, jobs, error))
            return
        for job in jobs:
            job.steps_left -= 1
        if taken is not None:
            self._scheduler.took(taken)

    async def _finish(self, jobs: Sequence[LoopJob]) -> None:
        began_s = time.monotonic()
        waves, error = await self._tried("finish", [job.number for job in jobs])
        if error is not None:
            await self._one_by_one(self._finish, jobs, error)
            return
        self._slack.finished(StepTime(sum(job.size for job in jobs), time.monotonic() - began_s))
        self._jobs = [job for job in self._jobs if job not in jobs]
        for job, wave in zip(jobs, waves, strict=True):
            job.make(wave)

    async def _one_by_one(
        self, make: Callable[[Sequence[LoopJob]], Awaitable[None]], jobs: Sequence[LoopJob], error: OmniError
    ) -> None:
        """Tries the jobs again one by one, so that only the broken one fails: the failed call changed nothing."""
        if len(jobs) == 1:
            await self._give_up(jobs[0], error)
            return
        for job in jobs:
            if not job.is_left:
                await make([job])

    async def _give_up(self, job: LoopJob, error: OmniError) -> None:
        job.fail(error)
        self._jobs.remove(job)
        await self._drop([job])

    async def _drop(self, jobs: Sequence[LoopJob]) -> None:
        if numbers := [job.number for job in jobs if job.is_begun]:
            await self._call("drop", numbers)

    async def _tried(self, method: str, *args: Any) -> tuple[Any, OmniError | None]:
        """Returns the model's result, or the error of this call alone. Raises what ends the loop."""
        try:
            return await self._call(method, *args), None
        except SoundEngineStopped:
            raise
        except OmniError as error:
            return None, error
        finally:
            self._calls += 1

    # --------------------------------------------------------- how it gets on

    @property
    def progress(self) -> Progress:
        """Its steps are calls of the model; waiting for codes is no work."""
        return Progress(self._calls, has_work=bool(self._jobs))

    def counts(self) -> dict[str, int]:
        """By the names of `COUNTED`."""
        jobs = [job for job in self._jobs if job.is_begun or not job.is_left]
        running = sum(job.is_begun for job in jobs)
        waiting = len(jobs) - running + self._streams.waiting
        held = sum(job.follows for job in jobs)
        return dict(zip(COUNTED, (running, waiting, held, len(self._streams)), strict=True))


@contextlib.asynccontextmanager
async def _closing(jobs: AsyncIterator[SoundJob]) -> AsyncIterator[AsyncIterator[SoundJob]]:
    try:
        yield jobs
    finally:
        if isinstance(jobs, AsyncGenerator):
            await jobs.aclose()
