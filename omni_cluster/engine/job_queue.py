"""Diffusion jobs that wait for a batch: whose sound is needed first is made first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from omni_cluster.config.schema import DiffusionConfig
from omni_cluster.models.family import DiffusionJob


@dataclass(slots=True)
class PendingJob:
    """A job, when its sound is due on the clock of `time.monotonic`, and where its waveform will be.

    `latest` gives the job as it can be by now: it may have grown while it waited.
    """

    job: DiffusionJob
    due_s: float
    done: asyncio.Future[np.ndarray]
    latest: Callable[[], DiffusionJob]


class JobQueue:
    """Earliest deadline first. Bounded by the requests that admission lets in: one job each."""

    def __init__(self, config: DiffusionConfig) -> None:
        self._config = config
        self._pending: list[PendingJob] = []

    def put(self, pending: PendingJob) -> None:
        self._pending.append(pending)

    def take_batch(self) -> list[PendingJob]:
        """The jobs that are due first, as many as a batch may hold and at least one; [] when none waits.

        Whole answers and pieces of streams share a batch. None overtakes one that is due before it and does not fit.
        """
        waiting = sorted(self._waiting(), key=lambda pending: pending.due_s)
        size = self._batch_size(waiting)
        self._pending = waiting[size:]
        return waiting[:size]

    def _waiting(self) -> list[PendingJob]:
        return [p for p in self._pending if not p.done.done()]  # the others were cancelled meanwhile

    def _batch_size(self, waiting: list[PendingJob]) -> int:
        frames = 0
        for size, pending in enumerate(waiting[: self._config.max_batch_size]):
            pending.job = pending.latest()
            frames += pending.job.frames
            if size and frames > self._config.max_batch_frames:
                return size
        return min(len(waiting), self._config.max_batch_size)

    def drain(self) -> list[PendingJob]:
        waiting, self._pending = self._waiting(), []
        return waiting

    def __len__(self) -> int:
        return len(self._waiting())


class Playback:
    """One request's sound as its client hears it: from the first piece on, until all that was delivered is heard."""

    def __init__(self) -> None:
        self._runs_dry_s: float | None = None

    def deliver(self, sound_s: float, now_s: float) -> None:
        self._runs_dry_s = (now_s if self._runs_dry_s is None else self._runs_dry_s) + sound_s

    def due_s(self, now_s: float) -> float:
        """When the next piece is needed: the first one at once, a later one when the client's player runs dry."""
        return now_s if self._runs_dry_s is None else self._runs_dry_s
