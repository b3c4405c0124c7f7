"""A bound on waiting by time: no stream is let in behind others that wait too long for their first output."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from omni_cluster.openai_api.errors import BadRequest

LATEST: Final = 4
"""First outputs that tell a queue from one request that takes long by itself, as CoDel does by the shortest sojourn."""


class SojournBound:
    """Streams between their arrival and their first output, which is sound or, of those without it, text.

    While the shortest of the latest waits is above half of `most_s`, as many may wait as begin in the other half.
    """

    def __init__(self, most_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`most_s` None: no bound."""
        self._most_s = most_s
        self._clock = clock
        self._latest: deque[tuple[float, float]] = deque(maxlen=LATEST)
        self.waiting = 0

    def enter(self, arrived_s: float) -> Sojourn:
        """`arrived_s`: by the clock. Raises BadRequest, 429, for a request that would wait too long."""
        self._check()
        self.waiting += 1
        return Sojourn(self, arrived_s)

    def _check(self) -> None:
        if self._most_s is None or len(self._latest) < LATEST:
            return
        per_s = (LATEST - 1) / max(self._clock() - self._latest[0][0], 1e-3)
        is_late = min(waited_s for _, waited_s in self._latest) > self._most_s / 2
        if is_late and self.waiting >= per_s * self._most_s / 2:
            raise BadRequest(
                f"{self.waiting} requests wait for their first output, and {per_s:.2g} a second get it: a further one "
                f"would wait longer than max_wait_s = {self._most_s:g}; send it again later.",
                code="too_many_requests",
                status=429,
                retry_after_s=self.waiting / per_s,
            )

    def leave(self, waited_s: float | None) -> None:
        """`waited_s`: until the first output; None where none came. When nothing waits, the queue has ended."""
        self.waiting -= 1
        if not self.waiting:
            self._latest.clear()
        elif waited_s is not None:
            self._latest.append((self._clock(), waited_s))

    def now_s(self) -> float:
        return self._clock()


class Sojourn:
    """One stream's wait."""

    def __init__(self, bound: SojournBound, arrived_s: float) -> None:
        self._bound: SojournBound | None = bound
        self._arrived_s = arrived_s

    def end(self) -> None:
        """Its first output is there."""
        if (bound := self._bound) is not None:
            self._bound = None
            bound.leave(bound.now_s() - self._arrived_s)

    def give_up(self) -> None:
        """It ends; nothing came, unless `end` was called."""
        if (bound := self._bound) is not None:
            self._bound = None
            bound.leave(None)
