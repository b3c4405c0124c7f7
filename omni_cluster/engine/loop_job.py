"""A diffusion job on its way through the steps of its model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from omni_cluster.models.family import DiffusionJob


class LoopJob:
    """A job, the time (`time.monotonic`) at which its sound is due, and the future of its waveform.

    `latest` returns the job at its present size: it may grow until it begins, which gives it a `number`.
    `before`: the stream's previous job, while that is being made.
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
    def frames_before(self) -> float:
        """Those that are heard of the jobs before it that are still made."""
        if self.before is None or not self.follows:
            return 0.0
        return heard_frames(self.before.job) * self.before.job.is_heard + self.before.frames_before

    @property
    def is_left(self) -> bool:
        """Nobody waits for it any more: it failed, or its caller left.

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
        self.before = None  # it is made, and would keep all before it
        if not self.done.done():
            self.done.set_result(samples)

    def fail(self, error: Exception) -> None:
        self.begun.set()
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # marks it as seen: the caller may have left with an earlier job's error


def heard_codes(job: DiffusionJob) -> int:
    """The job's codes without those of its look-ahead."""
    return len(job.codes) - job.look_ahead


def heard_frames(job: DiffusionJob) -> float:
    """The job's frames without those of its look-ahead."""
    return job.frames * heard_codes(job) / len(job.codes)
