"""How busy each replica of a stage is, as far as this process knows, and which one a new request goes to."""

from __future__ import annotations

import hashlib
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LAG_S = 0.1
"""The time from a choice here until the replica's reports count it."""
STALE_S = 3.0
"""A replica reports every second, busy or idle; older reports are ignored."""
LOST_COOLDOWN_S = 30.0
"""Serve may list a replica that is gone for so long."""
SILENT_COOLDOWN_S = 3.0
"""Of a replica that did not answer in time: it may only have too much to do. One that hangs is ended."""
BROKEN_COOLDOWN_S = 5.0
"""Of a replica whose connection broke: if it is gone, Serve no longer lists it by then."""
AFFINITY_LEAD = 2
"""A conversation leaves its replica when that has more requests than another one, by more than this."""


@dataclass(slots=True)
class Load:
    """`reported`: requests that the replica reports; None without a report. `own`: open requests of this process."""

    reported: int | None = None
    reported_at_s: float = 0.0
    started_at_s: deque[float] = field(default_factory=deque)
    own: int = 0

    def drop_starts_before(self, at_s: float) -> None:
        while self.started_at_s and self.started_at_s[0] < at_s:
            self.started_at_s.popleft()


class Loads:
    """The loads of one stage's replicas. Chooses one by power of two choices: the less busy of two random ones.

    The least busy of all would get every process's requests at once, until its next report. `serving`: so many of them
    take requests at most, and the others stand by; None: all of them.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
        serving: int | None = None,
    ) -> None:
        self._serving = serving
        self._clock = clock
        self._chance = chance or random.Random()
        self._by_replica: dict[str, Load] = {}
        self._cool_at_s: dict[str, float] = {}

    def on_report(self, replica_id: str, load: int) -> None:
        """The replica reported its load."""
        of = self._by_replica.setdefault(replica_id, Load())
        of.reported, of.reported_at_s = load, self._clock()
        of.drop_starts_before(of.reported_at_s - LAG_S)

    def on_disconnect(self, replica_id: str) -> None:
        """The connection to the replica ended: its last report no longer counts."""
        self._of(replica_id).reported = None
        self._drop_unused(replica_id)

    def on_loss(self, replica_id: str, cooldown_s: float = LOST_COOLDOWN_S) -> None:
        """The replica, or the connection to it, was lost: it gets no request until its cooldown is over."""
        now_s = self._clock()
        cool_at_s = max(now_s + cooldown_s, self._cool_at_s.get(replica_id, 0.0))
        self._cool_at_s = {each: at_s for each, at_s in self._cool_at_s.items() if at_s > now_s}
        self._cool_at_s[replica_id] = cool_at_s

    def living(self, replica_ids: Sequence[str]) -> list[str]:
        """Those of them that are in no cooldown."""
        now_s = self._clock()
        return [each for each in replica_ids if self._cool_at_s.get(each, 0.0) <= now_s]

    def choose(self, replica_ids: Sequence[str], conversation: bytes = b"", near: Sequence[str] = ()) -> str:
        """One of them, for a new request; `on_end` ends it.

        `near`: replicas that are near the request's input; one of the two choices is of these, if any is in
        `replica_ids`. More than two choices would herd on stale loads. `conversation`: 64 bytes of a name at most; its
        turns go to one replica, unless that is busier than another.
        """
        replica_ids = self._that_serve(replica_ids)
        one = self._chance.choice([each for each in near if each in replica_ids] or replica_ids)
        chosen = self._less_busy(one, self._chance.choice([each for each in replica_ids if each != one] or [one]))
        if conversation:
            chosen = self._less_busy(home_of(conversation, replica_ids), chosen, lead=AFFINITY_LEAD)
        self._on_start(chosen)
        return chosen

    def _that_serve(self, replica_ids: Sequence[str]) -> Sequence[str]:
        """Those that stand by are the last by name: so all processes agree, and none has to remember."""
        return replica_ids if self._serving is None else sorted(replica_ids)[: self._serving]

    def _on_start(self, replica_id: str) -> None:
        of = self._by_replica.setdefault(replica_id, Load())
        of.own += 1
        of.started_at_s.append(self._clock())
        of.drop_starts_before(self._clock() - STALE_S)

    def on_end(self, replica_id: str) -> None:
        """A request for which the replica was chosen is over. No report may have counted it yet."""
        of = self._of(replica_id)
        of.own -= 1
        while len(of.started_at_s) > max(of.own, 0):
            of.started_at_s.popleft()
        self._drop_unused(replica_id)

    def _less_busy(self, one: str, other: str, lead: int = 0) -> str:
        loads = self._estimate(one), self._estimate(other)
        if None in loads:  # a report and a guess cannot be compared
            loads = self._of(one).own, self._of(other).own
        return one if loads[0] <= loads[1] + lead else other  # type: ignore[operator]

    def _estimate(self, replica_id: str) -> int | None:
        of = self._of(replica_id)
        if of.reported is None or self._clock() - of.reported_at_s > STALE_S:
            return None
        return of.reported + len(of.started_at_s)

    def _of(self, replica_id: str) -> Load:
        return self._by_replica.get(replica_id) or Load()

    def _drop_unused(self, replica_id: str) -> None:
        of = self._of(replica_id)
        if of.reported is None and of.own <= 0:
            self._by_replica.pop(replica_id, None)


def home_of(conversation: bytes, replica_ids: Sequence[str]) -> str:
    """The conversation's replica by rendezvous hashing: each process finds the same, and few conversations move when
    replicas come or go.
    """
    return max(replica_ids, key=lambda each: hashlib.blake2b(each.encode(), key=conversation).digest())
