"""What a step of a diffusion model costs, learned from the steps that were made."""

from __future__ import annotations

import math

from omni_cluster.models.family import StepTime

MEMORY = 0.995
"""The factor by which a measured step's weight falls with each later step."""
PRIOR_WEIGHT = 0.5
"""The assumed cost weighs as much as so many measured steps, at each of `PRIOR_FRAMES`."""
PRIOR_FRAMES = (48, 3_072)


class StepCost:
    """A step takes `step_s`, and `frame_s` for each frame: fitted to the steps measured lately."""

    def __init__(self, step_s: float = 3e-3, frame_s: float = 6e-6) -> None:
        """What is assumed until steps are measured."""
        self.step_s, self.frame_s = step_s, frame_s
        self._prior = [(frames, step_s + frame_s * frames) for frames in PRIOR_FRAMES]
        self._sums = [0.0] * 5

    def observe(self, time: StepTime) -> None:
        x, y = time.frames, time.seconds
        self._sums = [MEMORY * s + new for s, new in zip(self._sums, (1, x, y, x * x, x * y), strict=True)]
        count, sum_x, sum_y, sum_xx, sum_xy = self._sums
        for x, y in self._prior:
            count, sum_x, sum_y = count + PRIOR_WEIGHT, sum_x + PRIOR_WEIGHT * x, sum_y + PRIOR_WEIGHT * y
            sum_xx, sum_xy = sum_xx + PRIOR_WEIGHT * x * x, sum_xy + PRIOR_WEIGHT * x * y
        slope = (count * sum_xy - sum_x * sum_y) / (count * sum_xx - sum_x * sum_x)
        self.frame_s = max(slope, 1e-9)
        self.step_s = max((sum_y - self.frame_s * sum_x) / count, 1e-6)

    def seconds(self, frames: float, steps: float = 1) -> float:
        """What that many frames take in so many steps."""
        return steps * self.step_s + frames * self.frame_s

    def frames_at_efficiency(self, part: float) -> float:
        """The size of a step that spends this part of its time on frames."""
        return part / (1 - part) * self.step_s / self.frame_s

    def frames_at_balance(self, work: float, newcomer_steps: float) -> float:
        """The size of steps with which the time for all of `work`, and that of a newcomer's steps, is least together.

        `work`: frames, each as often as it has steps left. Steps of n frames do it in
        work / n * (step_s + n * frame_s), a newcomer waits for newcomer_steps * (step_s + n * frame_s).
        """
        return math.sqrt(work * self.step_s / (newcomer_steps * self.frame_s))

    def frames_at_rate(self, frames_per_s: float) -> float:
        """The size of steps that advance so many frames a second."""
        if frames_per_s * self.frame_s >= 1:
            return math.inf
        return frames_per_s * self.step_s / (1 - frames_per_s * self.frame_s)
