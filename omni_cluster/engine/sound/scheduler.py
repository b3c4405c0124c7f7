"""Which jobs advance in the next step, what steps cost, and how close players are to falling silent.

Sizes are in the model's own measure of a job (`SoundJob.size`).
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from omni_cluster.engine.playback import Playback
from omni_cluster.models.sound import LinearCost, SoundPriors, StepTime

HORIZON_S = 0.1
"""Work that is due sooner is planned over this time: late work cannot all be done at once."""
MIN_EFFICIENCY = 0.5
"""The part of a step's time that grows with its size, at least: the rest is the same for the smallest step."""
STEP_MEMORY = 0.995
"""The factor by which a measured step's weight falls with each later step."""
PRIOR_WEIGHT = 0.5
"""The assumed cost weighs as much as so many measured steps, at each of the usual sizes."""
URGENT_S = 1.0
"""A player that has less sound left than this needs a piece in every round."""
PIECE_MEMORY = 0.95
"""The factor by which the weight of a piece's size falls with each later piece."""
MOST_PLAYERS = 4_096


class StepCost:
    """A step takes `step_s`, and `unit_s` for each unit of its size: fitted to the steps measured lately."""

    def __init__(self, assumed: LinearCost, usual_sizes: Sequence[int]) -> None:
        """`assumed`: until steps are measured, for steps of `usual_sizes`."""
        self.step_s, self.unit_s = assumed.base_s, assumed.unit_s
        self._prior = [(size, self.step_s + self.unit_s * size) for size in usual_sizes]
        self._sums = [0.0] * 5

    def observe(self, time: StepTime) -> None:
        x, y = time.size, time.seconds
        self._sums = [STEP_MEMORY * s + new for s, new in zip(self._sums, (1, x, y, x * x, x * y), strict=True)]
        count, sum_x, sum_y, sum_xx, sum_xy = self._sums
        for x, y in self._prior:
            count, sum_x, sum_y = count + PRIOR_WEIGHT, sum_x + PRIOR_WEIGHT * x, sum_y + PRIOR_WEIGHT * y
            sum_xx, sum_xy = sum_xx + PRIOR_WEIGHT * x * x, sum_xy + PRIOR_WEIGHT * x * y
        slope = (count * sum_xy - sum_x * sum_y) / (count * sum_xx - sum_x * sum_x)
        self.unit_s = max(slope, 1e-9)
        self.step_s = max((sum_y - self.unit_s * sum_x) / count, 1e-6)

    def seconds(self, size: float, steps: float = 1) -> float:
        """What jobs of that size take in so many steps."""
        return steps * self.step_s + size * self.unit_s

    def size_at_efficiency(self, part: float) -> float:
        """The size of a step of whose time this part grows with its size."""
        return part / (1 - part) * self.step_s / self.unit_s

    def size_at_balance(self, work: float, newcomer_steps: float) -> float:
        """The size of steps with which the time for all of `work`, and that of a newcomer's steps, is least together.

        `work`: the size of jobs, each as often as it has steps left. Steps of size n do it in
        work / n * (step_s + n * unit_s), a newcomer waits for newcomer_steps * (step_s + n * unit_s).
        """
        return math.sqrt(work * self.step_s / (newcomer_steps * self.unit_s))

    def size_at_rate(self, size_per_s: float) -> float:
        """The size of steps that do so much of it a second."""
        if size_per_s * self.unit_s >= 1:
            return math.inf
        return size_per_s * self.step_s / (1 - size_per_s * self.unit_s)


class Job(Protocol):
    """`size`: what a step of it costs by; `steps_left` of all its steps; `due_s`: when its sound is needed."""

    @property
    def size(self) -> int: ...
    @property
    def steps_left(self) -> int: ...
    @property
    def due_s(self) -> float: ...


AnyJob = TypeVar("AnyJob", bound=Job)


class StepScheduler:
    """Earliest deadline first, in steps that are as large as it takes to meet the deadlines.

    Where less would do, steps grow with the work that waits: small ones let a newcomer through soon, large ones do more
    a second, which is what helps everybody on a full card. Jobs that are due later pause: they stay where they are.
    """

    def __init__(
        self, max_size: int, max_jobs: int, priors: SoundPriors, cost: StepCost, clock: Callable[[], float]
    ) -> None:
        self._max_size, self._max_jobs, self._priors = max_size, max_jobs, priors
        self._cost, self._clock = cost, clock

    def choose(self, jobs: Sequence[AnyJob]) -> list[AnyJob]:
        """Those that the next step advances, of jobs that have steps left; at least one where there is one."""
        by_due = sorted(jobs, key=lambda job: job.due_s)
        room, size = self._room(by_due), 0
        chosen: list[AnyJob] = []
        for job in by_due[: 1 + 4 * self._max_jobs]:
            if not chosen or (size + job.size <= room and len(chosen) < self._max_jobs):
                chosen.append(job)
                size += job.size
        return chosen

    def _room(self, by_due: Sequence[Job]) -> float:
        """The size of the next step."""
        if not by_due:
            return 0
        work = sum(job.size * job.steps_left for job in by_due)
        efficient = self._cost.size_at_efficiency(MIN_EFFICIENCY)
        balanced = self._cost.size_at_balance(work, self._priors.newcomer_steps)
        needed = self._cost.size_at_rate(self._needed_rate(by_due))
        return min(self._max_size, max(efficient, balanced, needed))

    def to_finish(self, ended: Sequence[AnyJob], others: bool) -> list[AnyJob]:
        """Those to finish now, of jobs that have had all their steps; `others` have steps left.

        All or none, those that are due first in front: a pass that runs anyway takes the others along.
        """
        if not ended:
            return []
        is_due = min(job.due_s for job in ended) <= self._clock() + self._priors.finish_ahead_s
        if is_due or not others or sum(job.size for job in ended) >= self._priors.worth_finishing:
            return sorted(ended, key=lambda job: job.due_s)
        return []

    def took(self, time: StepTime) -> None:
        """A step was measured."""
        self._cost.observe(time)

    def _needed_rate(self, by_due: Sequence[Job]) -> float:
        """The size of work to do a second, each job's for each of its steps, so that every job is done when due."""
        by_s = self._clock() + self._priors.finish_ahead_s
        rate, work = 0.0, 0
        for job in by_due:
            work += job.size * job.steps_left
            rate = max(rate, work / max(HORIZON_S, job.due_s - by_s))
        return rate


class Slack:
    """The players of one stage, and how many of them it could serve in time.

    A round makes one piece for each urgent player: all `steps` of it, in steps of at most `max_size`, and the pass
    that finishes it. `step_cost` and the cost of a pass are learned from what was made last, beside whatever else the
    card did then.
    """

    def __init__(
        self, steps: int, max_size: int, priors: SoundPriors, step_cost: StepCost, clock: Callable[[], float]
    ) -> None:
        self._steps, self._max_size, self._step_cost, self._clock = steps, max_size, step_cost, clock
        self._pass_cost = StepCost(priors.finish, priors.usual_sizes)
        self._piece_size, self._cushion_s = priors.piece_size, priors.cushion_s
        self._players: dict[str, Playback] = {}

    @contextlib.contextmanager
    def player(self, stream: str) -> Iterator[Playback]:
        """The player of a stream, until all its sound is made."""
        playback = self._players[stream] = Playback()
        try:
            yield playback
        finally:
            del self._players[stream]

    def began(self, size: int, left_s: float) -> None:
        """A piece of that size was begun for a player that had so much sound left."""
        if left_s < URGENT_S:
            self._piece_size = PIECE_MEMORY * self._piece_size + (1 - PIECE_MEMORY) * size

    def finished(self, time: StepTime) -> None:
        """A pass was measured."""
        self._pass_cost.observe(time)

    def use(self) -> float:
        """Urgent streams, as a part of those that could all get a piece before their cushions are used up."""
        now_s = self._clock()
        urgent = sum(player.left_s(now_s) < URGENT_S for player in self._players.values())
        return urgent / self.most_players()

    def most_players(self) -> int:
        """The most players whose round takes no longer than their cushion lasts, one at least."""
        return max(1, bisect.bisect_right(range(1, MOST_PLAYERS), self._cushion_s, key=self.round_s))

    def round_s(self, players: int) -> float:
        """What a round of so many players takes."""
        size = players * self._piece_size
        steps = max(1.0, size / self._max_size)
        return self._steps * self._step_cost.seconds(size, steps) + self._pass_cost.seconds(size)
