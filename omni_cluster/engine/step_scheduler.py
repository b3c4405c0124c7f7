"""Which diffusion jobs advance in the next step: those whose sound is needed first, and as many as time allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from omni_cluster.engine.step_cost import StepCost
from omni_cluster.models.family import StepTime

HORIZON_S = 0.1
"""Work that is due sooner is planned over this time: late work cannot all be done at once."""
FINISH_S = 0.15
"""A job that has had all its steps is finished so long before it is due, or sooner beside others: a pass waits for the
step that runs, takes tens of milliseconds on a card with other stages, and then its sound travels to the client."""
FINISH_FRAMES = 1_280
"""So many frames of jobs that have had all their steps are worth a pass of their own."""
MIN_EFFICIENCY = 0.5
"""The part of a step's time that is spent on frames, at least: the rest is the same for a step of one frame."""
NEWCOMER_STEPS = 4
"""So many steps of a job that comes now count against larger ones. It waits for ten, the rest of the one that runs and
its own; fewer count, for larger steps do more a second."""


class Job(Protocol):
    """`frames`: what a step of it costs by; `steps_left` of all its steps; `due_s`: when its sound is needed."""

    @property
    def frames(self) -> int: ...
    @property
    def steps_left(self) -> int: ...
    @property
    def due_s(self) -> float: ...


AnyJob = TypeVar("AnyJob", bound=Job)


class Scheduler(Protocol[AnyJob]):
    """What a step loop asks."""

    def choose(self, jobs: Sequence[AnyJob]) -> list[AnyJob]:
        """Those that the next step advances, of jobs that have steps left; at least one where there is one."""

    def to_finish(self, ended: Sequence[AnyJob], others: bool) -> list[AnyJob]:
        """Those to finish now, in this order, of jobs that have had all their steps; `others` have steps left."""

    def took(self, time: StepTime) -> None:
        """A step was measured."""


class StepScheduler(Generic[AnyJob]):
    """Earliest deadline first, in steps that are as large as it takes to meet the deadlines.

    Where less would do, steps grow with the work that waits: small ones let a newcomer through soon, large ones do more
    a second, which is what helps everybody on a full card. Jobs that are due later pause: they stay where they are.
    """

    def __init__(self, max_frames: int, max_jobs: int, cost: StepCost, clock: Callable[[], float]) -> None:
        self._max_frames, self._max_jobs, self._cost, self._clock = max_frames, max_jobs, cost, clock

    def choose(self, jobs: Sequence[AnyJob]) -> list[AnyJob]:
        by_due = sorted(jobs, key=lambda job: job.due_s)
        room, frames = self._room(by_due), 0
        chosen: list[AnyJob] = []
        for job in by_due[: 1 + 4 * self._max_jobs]:
            if not chosen or (frames + job.frames <= room and len(chosen) < self._max_jobs):
                chosen.append(job)
                frames += job.frames
        return chosen

    def _room(self, by_due: Sequence[AnyJob]) -> float:
        """Frames of the next step."""
        if not by_due:
            return 0
        work = sum(job.frames * job.steps_left for job in by_due)
        efficient = self._cost.frames_at_efficiency(MIN_EFFICIENCY)
        balanced = self._cost.frames_at_balance(work, NEWCOMER_STEPS)
        needed = self._cost.frames_at_rate(_needed_rate(by_due, self._clock()))
        return min(self._max_frames, max(efficient, balanced, needed))

    def to_finish(self, ended: Sequence[AnyJob], others: bool) -> list[AnyJob]:
        """Returns all or none, those that are due first in front: a pass that runs anyway takes the others along."""
        if not ended:
            return []
        is_due = min(job.due_s for job in ended) <= self._clock() + FINISH_S
        if is_due or not others or sum(job.frames for job in ended) >= FINISH_FRAMES:
            return sorted(ended, key=lambda job: job.due_s)
        return []

    def took(self, time: StepTime) -> None:
        self._cost.observe(time)


def _needed_rate(by_due: Sequence[Job], now_s: float) -> float:
    """Frames a second, each as often as it has steps left, so that every job is done when it is due."""
    rate, work = 0.0, 0
    for job in by_due:
        work += job.frames * job.steps_left
        rate = max(rate, work / max(HORIZON_S, job.due_s - now_s - FINISH_S))
    return rate
