"""How long a stream's first sound waits, so that its player does not run dry behind it."""

from __future__ import annotations

import math

from omni_cluster.engine.playback import Playback

MARGIN_S = 0.05
"""How much sooner than a player runs dry the latest chunk should come."""
DECAY = 0.002
"""Seconds by which the peak falls in a second: what was late a minute ago delays nothing."""


class PlayoutDelay:
    """Adaptive playout delay: the latest that chunks came lately, as a peak that decays, and a margin.

    Where chunks come in time, as on a stage with little to do, it is 0. A stream's first chunk is made as soon as can
    be, and the one behind it beside all other work: on a busy card that is late by some hundredths of a second, which
    a player that started so much later does not notice. The name and the idea: Ramjee and others, Adaptive playout
    mechanisms for packetized audio applications in wide-area networks, INFOCOM 1994.
    """

    def __init__(self, max_delay_s: float) -> None:
        self._max_delay_s = max_delay_s
        self._peak_s, self._at_s = -math.inf, 0.0

    def of(self, player: Playback, now_s: float) -> float:
        """By how much a chunk that is there is delayed: a stream's first alone, by what the others said."""
        if not player.has_begun:
            return self.delay_s(now_s)
        self.came(now_s - player.due_s(now_s), now_s)
        return 0.0

    def came(self, late_s: float, now_s: float) -> None:
        """A chunk came `late_s` after a player without delay ran dry, or sooner than that where it is below 0.

        One that no delay would have helped says nothing: its text came slowly, or the stage has too much to do.
        """
        if late_s <= self._max_delay_s:
            self._peak_s, self._at_s = max(late_s, self._decayed_s(now_s)), now_s

    def delay_s(self, now_s: float) -> float:
        """Of a stream whose first chunk is there."""
        return min(max(0.0, self._decayed_s(now_s) + MARGIN_S), self._max_delay_s)

    def _decayed_s(self, now_s: float) -> float:
        return self._peak_s - DECAY * (now_s - self._at_s)
