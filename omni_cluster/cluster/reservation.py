"""A replica is kept free for one request: others go elsewhere, those that run here end, and then it has the replica."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from enum import Enum

from omni_cluster.engine.output_log import OutputLogs

LEASE_S = 5.0
"""So long a reservation lasts from the last time that it was asked for: whoever wants it asks more often."""
SETTLE_S = 0.5
"""Until each ingress knows of a reservation, and what they had sent before has come."""


class Turn(Enum):
    """What a request is told that asks for a replica: another one has it, it is still at work, or it is free."""

    TAKEN = "taken"
    BUSY = "busy"
    FREE = "free"


class Reservation:
    """The one request, if any, that a replica is kept free for. `logs`: those of all requests of the replica.

    It ends by itself: with its request, once that has begun, and else LEASE_S after it was last asked for, as when the
    client has left or the ingress has died.
    """

    def __init__(self, logs: OutputLogs, clock: Callable[[], float] = time.monotonic) -> None:
        self._logs = logs
        self._clock = clock
        self._request_id = ""
        self._began_s = self._ends_s = -float("inf")
        self._is_used = False

    @property
    def is_held(self) -> bool:
        return self._is_used or self._clock() < self._ends_s

    def ask(self, request_id: str) -> Turn:
        """Keeps the replica free for the request, or goes on to, unless another one has the reservation.

        FREE once no other request is here, finished ones that others may still need included.
        """
        now_s = self._clock()
        if not self.is_held:
            self._request_id, self._began_s = request_id, now_s
        elif self._request_id != request_id:
            return Turn.TAKEN
        self._ends_s = now_s + LEASE_S
        return Turn.FREE if not len(self._logs) and now_s >= self._began_s + SETTLE_S else Turn.BUSY

    @contextlib.contextmanager
    def used_by(self, request_id: str) -> Iterator[None]:
        """The request is here as long as the context is open. If the replica was kept free for it, it is until then."""
        if not self.is_held or self._request_id != request_id:
            yield
            return
        self._is_used = True
        try:
            yield
        finally:
            self._is_used = False
            self._ends_s = self._clock()
