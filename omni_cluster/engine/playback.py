"""When a client runs out of sound."""

from __future__ import annotations

import math


class Playback:
    """One request's sound as its client hears it: from the first piece on, until all that was delivered is heard.

    A player that ran dry goes on when the next piece comes, and hears all that follows so much later. One that starts
    with a delay hears all of it so much later, and each piece is still due as if it did not.
    """

    def __init__(self) -> None:
        self.stall_s = 0.0
        """How long its player has stood still, from the first piece on."""
        self._runs_dry_s = -math.inf
        self._delay_s = 0.0

    @property
    def has_begun(self) -> bool:
        return self._runs_dry_s != -math.inf

    def deliver(self, sound_s: float, now_s: float, delay_s: float = 0.0) -> None:
        """`delay_s`: of the first piece, which the client is given so much later."""
        if self.has_begun:
            self.stall_s += max(0.0, now_s - self._runs_dry_s)
        else:
            self._delay_s, self._runs_dry_s = delay_s, now_s + delay_s
        self._runs_dry_s = max(self._runs_dry_s, now_s) + sound_s

    def due_s(self, now_s: float) -> float:
        """When the next piece is needed: the first one at once, a later one when a player without delay runs dry."""
        return self._runs_dry_s - self._delay_s if self.has_begun else now_s

    def left_s(self, now_s: float) -> float:
        """The sound that the player has left; none before the first."""
        return max(0.0, self._runs_dry_s - now_s)
