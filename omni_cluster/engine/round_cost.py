"""What it takes to make one piece of sound for each of many streams at once."""

from __future__ import annotations

import bisect

from omni_cluster.engine.step_cost import StepCost
from omni_cluster.models.family import StepTime

URGENT_S = 1.0
"""A player that has less sound left than this needs a piece in every round."""
MEMORY = 0.95
"""The factor by which the weight of a piece's size falls with each later piece."""
PIECE_FRAMES = 72.0
"""Of an urgent player's piece, until such pieces are seen."""
MOST_STREAMS = 4_096
STEP_S, STEP_FRAME_S = 1e-2, 1.05e-5
PASS_S, PASS_FRAME_S = 4e-3, 2.5e-5
"""A step and a pass, and each of their frames, on a card that autoregressive stages share: until some are measured."""


class RoundCost:
    """A round: all `steps` of a piece for each stream, of at most `max_frames` each, and the pass that finishes them.

    All of it is learned from what was made last, beside whatever else the card did then.
    """

    def __init__(self, steps: int, max_frames: int) -> None:
        self._step, self._pass = StepCost(STEP_S, STEP_FRAME_S), StepCost(PASS_S, PASS_FRAME_S)
        self._steps, self._max_frames = steps, max_frames
        self._piece_frames = PIECE_FRAMES

    def began(self, frames: int, left_s: float) -> None:
        """A piece of that size was begun for a player that had so much sound left."""
        if left_s < URGENT_S:
            self._piece_frames = MEMORY * self._piece_frames + (1 - MEMORY) * frames

    def stepped(self, time: StepTime) -> None:
        """A step was measured."""
        self._step.observe(time)

    def finished(self, time: StepTime) -> None:
        """A pass was measured."""
        self._pass.observe(time)

    def streams_within(self, seconds: float) -> int:
        """The most streams whose round takes no longer, one at least."""
        return max(1, bisect.bisect_right(range(1, MOST_STREAMS), seconds, key=self.seconds))

    def seconds(self, streams: int) -> float:
        """What a round of so many streams takes."""
        frames = streams * self._piece_frames
        each = max(1.0, frames / self._max_frames)
        return self._steps * self._step.seconds(frames, each) + self._pass.seconds(frames)
