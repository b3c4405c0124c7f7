"""What a time on another host's clock is on this one's, without their clocks agreeing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

WINDOW_S = 60.0
"""Clocks drift, and are set: a frame that came quickly counts for one to two of these."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class PeerClock:
    """The clock of a connection's other end, by what each of its frames says: when it was sent, on that clock.

    The frame that came the fastest is taken to have come at once. So times of another host are exact but for the
    fastest frame's time on the network, which no end can measure alone. One host's processes share a clock.
    """

    def __init__(self, *, is_own: bool, clock: Callable[[], float] = time.time) -> None:
        """`is_own`: whether the other end runs on this host."""
        self._is_own = is_own
        self._clock = clock
        self._window_ends_s = 0.0
        self._least_s = self._least_before_s = float("inf")

    def heard(self, sent_at_s: float) -> None:
        """A frame came that was sent then."""
        now_s = self._clock()
        if not 0 <= self._window_ends_s - now_s <= WINDOW_S:
            self._window_ends_s = now_s + WINDOW_S
            self._least_s, self._least_before_s = float("inf"), self._least_s
        self._least_s = min(self._least_s, now_s - sent_at_s)

    def own_s(self, at_s: float) -> float:
        """The time `at_s` of the other end's clock, on this one's. At least one frame was heard."""
        return at_s if self._is_own else at_s + min(self._least_s, self._least_before_s)


def boot_id() -> str:
    """Names this host and its clock, in every container on it; "" where the system has no such name."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
