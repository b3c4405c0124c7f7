"""What a sound stage's engine and the family's model of it say to each other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class SoundJob:
    """One piece of sound to make: `samples` of a request's sound, of `codes`, integers `[n, Q]` of Q codebooks.

    Whole mode: `stream` is None and the piece is all of the request. Streaming: the pieces of one `stream` come in
    order, each once the one before it is begun, and its samples follow those of that one. The last `look_ahead` codes
    only tell the piece what follows: their own sound is made by the next piece. A stream may begin in the midst of its
    request, with nothing before it, but with the noise that a stream from the beginning has there. `context` `[m, Q]`:
    codes before the stream's first one whose sound is not the request's, such as those of a reference clip.
    `size` is what batching goes by, in the model's own measure (mel frames, codes), those of the look-ahead among them.
    `parts`: a job in whole mode may be made part after part, each in all steps of the model, so that others have their
    steps in between; `size` is that of the largest part.
    `voice` and `seed` are None where the model takes none. `is_heard`: False for a piece whose sound was delivered
    before its request was begun again: it is made for what it leaves to the next one.
    """

    codes: np.ndarray
    samples: range
    size: int
    voice: str | None = None
    seed: int | None = None
    context: np.ndarray | None = None
    stream: str | None = None
    look_ahead: int = 0
    is_heard: bool = True
    parts: int = 1


class SoundSession(Protocol):
    """One request in one sound stage: turns what comes from upstream into jobs."""

    def jobs(self) -> AsyncIterator[SoundJob]:
        """The next job is asked for once the one before it is begun: what came meanwhile may make it larger."""

    def latest(self) -> SoundJob:
        """The job that `jobs` gave last, with what has come since: asked until it is begun, and it is what runs."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step of jobs of this `size`, all together, took so long on the device."""

    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds of a call: `base_s`, and `unit_s` for each unit of its jobs' size."""

    base_s: float
    unit_s: float


@dataclass(frozen=True, slots=True)
class SoundPriors:
    """What is assumed of a sound model on a card, until its own calls are measured. Sizes are those of `SoundJob`.

    `step`, `finish`: what these calls cost. `usual_sizes`: the smallest and the largest usual step, for which the
    assumed cost counts. `worth_finishing`: jobs of this size together that have had all their steps are worth a call
    that finishes them. `finish_ahead_s`: a job is finished so long before its sound is due. `newcomer_steps`: so many
    steps of a job that comes now count against larger ones. `piece_size`: of a piece for a player that is short of
    sound. `cushion_s`: the sound that such a player has when its next piece is begun.
    """

    step: LinearCost
    finish: LinearCost
    usual_sizes: tuple[int, int]
    worth_finishing: int
    finish_ahead_s: float
    newcomer_steps: float
    piece_size: float
    cushion_s: float


class SoundModel(Protocol):
    """A loaded sound model: jobs advance by steps, and those of one step may each be at another of theirs.

    The caller names each job by a number of its own. The jobs of a stream are begun and finished in order; a job may be
    begun while those before it are not finished, and takes each of its steps later than they do. When `step` or
    `finish` raises, all jobs and streams are as they were before: it is tried again with one job after another.
    """

    steps: int
    """Of every part of a job, from its beginning until it can be finished: those of a flow, or one."""
    overlaps: bool
    """Whether the sound of finished jobs is made beside the steps of others."""

    def begin(self, number: int, job: SoundJob) -> None:
        """Takes a job in. PayloadError for invalid codes, before anything is indexed by them."""

    def step(self, numbers: Sequence[int], ending: Sequence[int] = ()) -> StepTime | None:
        """Advances jobs by one step. May return before the device has made it; gives the time of one that it has.

        `ending`: jobs that the next call of `finish` is of, in its order, where the model `overlaps`: their sound is
        begun with this step.
        """

    def finish(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """Float32 mono waveforms in [-1, 1], `len(job.samples)` of each job; the jobs are gone then.

        Of a job that is not heard, any sound of its length.
        """

    def drop(self, numbers: Sequence[int]) -> None:
        """Frees jobs at whatever step; the stream of one goes no further and is to be forgotten."""

    def forget(self, streams: Sequence[str]) -> None:
        """Frees the state of streams that have ended, at whatever point; ignores unknown ones."""
