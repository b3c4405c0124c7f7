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
SOON_S = 0.3
"""Beside a player that stands still, steps have work that is due so soon."""
FINISH_FRAMES = 1_280
"""So many frames of jobs that have had all their steps are worth a pass of their own."""
PAUSING_PART = 0.5
"""Of the time until a job is due: what its steps, and those before it, may take so that they need not begin yet."""
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

    def has_time(self, jobs: Sequence[AnyJob]) -> bool:
        """Whether these jobs would be done in time if less of the card were theirs."""

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
        for job in self._to_choose_from(by_due):
            if not chosen or (frames + job.frames <= room and len(chosen) < self._max_jobs):
                chosen.append(job)
                frames += job.frames
        return chosen

    def _to_choose_from(self, by_due: Sequence[AnyJob]) -> Sequence[AnyJob]:
        """While a player stands still, what others need soon is taken along, and nothing else."""
        by_due = by_due[: 1 + 4 * self._max_jobs]
        now_s = self._clock()
        if not by_due or by_due[0].due_s > now_s:
            return by_due
        return [job for job in by_due if job.due_s <= now_s + SOON_S]

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
        """Those that are due first in front. A pass that runs anyway takes all along, unless a player stands still."""
        if not ended:
            return []
        by_due, now_s = sorted(ended, key=lambda job: job.due_s), self._clock()
        if by_due[0].due_s <= now_s and others:
            return [job for job in by_due if job.due_s <= now_s + FINISH_S]
        if by_due[0].due_s <= now_s + FINISH_S or not others or sum(job.frames for job in ended) >= FINISH_FRAMES:
            return by_due
        return []

    def has_time(self, jobs: Sequence[AnyJob]) -> bool:
        """Whether half of the time until each job is due would do, in steps of the least efficiency."""
        work_s, now_s = 0.0, self._clock()
        for job in sorted(jobs, key=lambda job: job.due_s):
            work_s += self._cost.frame_s * job.frames * job.steps_left / MIN_EFFICIENCY
            if work_s > PAUSING_PART * (job.due_s - now_s - FINISH_S):
                return False
        return True

    def took(self, time: StepTime) -> None:
        self._cost.observe(time)


def _needed_rate(by_due: Sequence[Job], now_s: float) -> float:
    """Frames a second, each as often as it has steps left, so that every job is done when it is due."""
    rate, work = 0.0, 0
    for job in by_due:
        work += job.frames * job.steps_left
        rate = max(rate, work / max(HORIZON_S, job.due_s - now_s - FINISH_S))
    return rate
