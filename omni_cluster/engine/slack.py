"""How close a sound stage is to letting its players fall silent: the signal that its autoscaling follows."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator

from omni_cluster.engine.playback import Playback
from omni_cluster.engine.step_cost import StepCost
from omni_cluster.models.family import StepTime

URGENT_S = 1.0
"""A player that has less sound left than this needs a piece in every round."""
MEMORY = 0.95
"""The factor by which the weight of a piece's size falls with each later piece."""
MOST_PLAYERS = 4_096
PIECE_FRAMES = 72.0
"""Of an urgent player's piece, until such pieces are seen."""
CUSHION_S = 0.15
"""What such a player has left when a round begins: the sound of a first piece, less its way to the client."""
PASS_S, PASS_FRAME_S = 4e-3, 2.5e-5
"""A pass, and each of its frames, until some are measured."""


class Slack:
    """The players of one stage, and how many of them it could serve in time.

    A round makes one piece for each urgent player: all `steps` of it, in steps of at most `max_frames`, and the pass
    that finishes it. `step_cost` and the cost of a pass are learned from what was made last, beside whatever else the
    card did then.
    """

    def __init__(self, steps: int, max_frames: int, step_cost: StepCost, clock: Callable[[], float]) -> None:
        self._steps, self._max_frames, self._step_cost, self._clock = steps, max_frames, step_cost, clock
        self._pass_cost = StepCost(PASS_S, PASS_FRAME_S)
        self._piece_frames = PIECE_FRAMES
        self._players: dict[str, Playback] = {}

    @contextlib.contextmanager
    def player(self, stream: str) -> Iterator[Playback]:
        """The player of a stream, until all its sound is made."""
        playback = self._players[stream] = Playback()
        try:
            yield playback
        finally:
            del self._players[stream]

    def began(self, frames: int, left_s: float) -> None:
        """A piece of that size was begun for a player that had so much sound left."""
        if left_s < URGENT_S:
            self._piece_frames = MEMORY * self._piece_frames + (1 - MEMORY) * frames

    def finished(self, time: StepTime) -> None:
        """A pass was measured."""
        self._pass_cost.observe(time)

    def use(self) -> float:
        """Urgent players, as a part of those of whom each could get a piece before its cushion is used up."""
        now_s = self._clock()
        urgent = sum(player.left_s(now_s) < URGENT_S for player in self._players.values())
        return urgent / self.most_players()

    def most_players(self) -> int:
        """The most players whose round takes no longer than their cushion lasts, one at least."""
        return max(1, bisect.bisect_right(range(1, MOST_PLAYERS), CUSHION_S, key=self.round_s))

    def round_s(self, players: int) -> float:
        """What a round of so many players takes."""
        frames = players * self._piece_frames
        rounds = max(1.0, frames / self._max_frames)
        return self._steps * self._step_cost.seconds(frames, rounds) + self._pass_cost.seconds(frames)
