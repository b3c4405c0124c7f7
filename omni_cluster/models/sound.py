"""What a sound stage's engine and the family's model of it say to each other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class DiffusionJob:
    """One piece of sound to make: `codes` of one request in `voice`, noise from `seed`.

    Whole mode: `stream` is None and the piece is all of the request. Streaming: the pieces of one `stream` come in
    order, each once the one before it is begun; `start` is the position of the first code in the request, and the last
    `look_ahead` codes only tell the piece what follows: their own sound is made by the next piece. A stream may begin
    in the midst of its request, with nothing before it, but with the noise that a stream from the beginning has there.
    `frames` is the length that batching goes by (mel frames, those of the look-ahead among them). `is_heard`: False for
    a piece whose sound was delivered before its request was begun again: it is made for what it leaves to the next one.
    """

    codes: tuple[int, ...]
    voice: str
    seed: int
    frames: int
    stream: str | None = None
    start: int = 0
    look_ahead: int = 0
    is_heard: bool = True


class DiffusionSession(Protocol):
    """One request in one diffusion stage: turns what comes from upstream into jobs."""

    def jobs(self) -> AsyncIterator[DiffusionJob]:
        """The next job is asked for once the one before it is begun: what came meanwhile may make it larger."""

    def latest(self) -> DiffusionJob:
        """The job that `jobs` gave last, with what has come since: asked until it is begun, and it is what runs."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step of so many frames, all its jobs together, took so long on the device."""

    frames: int
    seconds: float


class DiffusionModel(Protocol):
    """A loaded diffusion model: jobs advance by steps, and those of one step may each be at another of theirs.

    Who calls names each job by a number of its own. The jobs of a stream are begun and finished in order; a job may be
    begun while those before it are not finished, and takes each of its steps later than they do. When `step` or
    `finish` raises, all jobs and streams are as they were before: it is tried again with one job after another.
    """

    sample_rate_hz: int
    steps: int
    """Of every job, from its beginning until it can be finished."""

    def begin(self, number: int, job: DiffusionJob) -> None:
        """Takes a job in. PayloadError for invalid codes, before anything is indexed by them."""

    def step(self, numbers: Sequence[int]) -> StepTime | None:
        """Advances jobs by one step. May return before the device has made it; gives the time of one that it has."""

    def finish(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """Float32 mono waveforms in [-1, 1], one a job, without the sound of its look-ahead; the jobs are gone then.

        Of a job that is not heard, any sound of its length.
        """

    def drop(self, numbers: Sequence[int]) -> None:
        """Frees jobs at whatever step; the stream of one goes no further and is to be forgotten."""

    def forget(self, streams: Sequence[str]) -> None:
        """Frees the state of streams that have ended, at whatever point; ignores unknown ones."""
