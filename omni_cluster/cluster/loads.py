"""How busy each replica of a stage is, as far as this process knows, and which one a new request goes to."""

from __future__ import annotations

import hashlib
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

LAG_S = 0.1
"""The time from a choice here until the replica's reports count it."""
STALE_S = 3.0
"""A replica reports every second, busy or idle; older reports are ignored."""
LOST_S = 30.0
"""So long Serve may go on listing a replica that is gone."""
SILENT_S = 3.0
"""So long a replica rests that did not answer in time: it may only have too much to do. One that hangs is ended."""
BROKEN_S = 5.0
"""So long a replica rests whose connection broke: if it is gone, Serve no longer lists it by then."""
HOME_LEAD = 2
"""So many requests more than another replica a conversation's own may have: it need not compute the earlier turns."""


@dataclass(slots=True)
class Load:
    """`told`: requests that the replica reports; None without a report. `own`: open requests of this process."""

    told: int | None = None
    told_at_s: float = 0.0
    chosen_at_s: deque[float] = field(default_factory=deque)
    own: int = 0

    def drop_choices_before(self, at_s: float) -> None:
        while self.chosen_at_s and self.chosen_at_s[0] < at_s:
            self.chosen_at_s.popleft()


class Loads:
    """The loads of one stage's replicas. A request goes to the less busy of two that are chosen at random.

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
        self._lost_until_s: dict[str, float] = {}
        self._lost_at_s: dict[str, float] = {}
        self._reserved_until_s: dict[str, float] = {}

    def told(self, replica_id: str, load: int, *, is_reserved: bool = False) -> None:
        """The replica reported its load, and whether it is kept free for a request."""
        of = self._by_replica.setdefault(replica_id, Load())
        of.told, of.told_at_s = load, self._clock()
        of.drop_choices_before(of.told_at_s - LAG_S)
        if is_reserved:
            self.reserved(replica_id)
        else:
            self._reserved_until_s.pop(replica_id, None)

    def reserved(self, replica_id: str) -> None:
        """The replica is kept free for a request: until it says otherwise, or says nothing any more."""
        now_s = self._clock()
        self._reserved_until_s = {each: until_s for each, until_s in self._reserved_until_s.items() if until_s > now_s}
        self._reserved_until_s[replica_id] = now_s + STALE_S

    def forget(self, replica_id: str) -> None:
        """The connection to the replica ended: its last report no longer counts."""
        self._of(replica_id).told = None
        self._reserved_until_s.pop(replica_id, None)
        self._drop_unused(replica_id)

    def lost(self, replica_id: str, rest_s: float = LOST_S) -> None:
        """The replica, or the connection to it, was lost: no request goes there for so long, at least.

        Only one that a request lost rests for `LOST_S`; others may have been silent, or ended in order.
        """
        now_s = self._clock()
        if rest_s >= LOST_S:
            self._lost_at_s = {each: at_s for each, at_s in self._lost_at_s.items() if at_s > now_s - LOST_S}
            self._lost_at_s.setdefault(replica_id, now_s)
        rest_until_s = max(now_s + rest_s, self._lost_until_s.get(replica_id, 0.0))
        self._lost_until_s = {each: until_s for each, until_s in self._lost_until_s.items() if until_s > now_s}
        self._lost_until_s[replica_id] = rest_until_s

    def lost_at_s(self) -> Mapping[str, float]:
        """When a request lost each replica that was lost in the last `LOST_S`."""
        return self._lost_at_s

    def living(self, replica_ids: Sequence[str], *, idle: bool = False) -> list[str]:
        """Those that were not lost; `idle`: and that have nothing to do, as far as is known here."""
        now_s = self._clock()
        living = [each for each in replica_ids if self._lost_until_s.get(each, 0.0) <= now_s]
        return [each for each in living if self._is_idle(each)] if idle else living

    def _is_idle(self, replica_id: str) -> bool:
        return self._of(replica_id).own <= 0 and not self._estimate(replica_id)

    def to_reserve(self, living: Sequence[str], own: str | None = None) -> str | None:
        """The least busy of those that are kept free for nobody, to be kept free for a request; None if it must wait.

        `own`: the one that it has asked for already. One replica at least is left to all others. If each is kept free
        for somebody, as when several processes have asked at once, whoever has the last by name gives it up.
        """
        free = [each for each in living if each != own and not self._is_reserved(each)]
        if own in living:
            return own if free or own != max(living) else None
        return min(free, key=lambda each: (self._at_least(each), each)) if len(free) > 1 else None

    def _at_least(self, replica_id: str) -> int:
        """Requests that the replica has, as far as is known here."""
        return max(self._of(replica_id).own, self._estimate(replica_id) or 0)

    def _is_reserved(self, replica_id: str) -> bool:
        return self._reserved_until_s.get(replica_id, 0.0) > self._clock()

    def choose(
        self, replica_ids: Sequence[str], conversation: bytes = b"", nearby: Sequence[Sequence[str]] = ()
    ) -> str:
        """One of them, for a new request; `ended` tells when it is over. None that is kept free, if there is another.

        The turns of a conversation, 64 bytes of a name at most, go to one replica unless that is busier than another.
        `nearby`: those of them that are nearest to where the request's input is, then those that are rather near; one
        of the two is of the first of these that are any. A third to choose from would be worse: what is known is old,
        and the more each process chooses from, the more of them choose the same.
        """
        replica_ids = self._that_serve([each for each in replica_ids if not self._is_reserved(each)] or replica_ids)
        near = next(filter(None, ([each for each in some if each in replica_ids] for some in nearby)), replica_ids)
        one = self._chance.choice(near)
        chosen = self._less_busy(one, self._chance.choice([each for each in replica_ids if each != one] or [one]))
        if conversation:
            chosen = self._less_busy(home_of(conversation, replica_ids), chosen, lead=HOME_LEAD)
        self.chosen(chosen)
        return chosen

    def _that_serve(self, replica_ids: Sequence[str]) -> Sequence[str]:
        """Those that stand by are the last by name: so all processes agree, and none has to remember."""
        return replica_ids if self._serving is None else sorted(replica_ids)[: self._serving]

    def chosen(self, replica_id: str) -> None:
        """The replica has a new request; `ended` tells when it is over."""
        of = self._by_replica.setdefault(replica_id, Load())
        of.own += 1
        of.chosen_at_s.append(self._clock())
        of.drop_choices_before(self._clock() - STALE_S)

    def ended(self, replica_id: str) -> None:
        """A request for which the replica was chosen is over, and may be so before any report counted it."""
        of = self._of(replica_id)
        of.own -= 1
        while len(of.chosen_at_s) > max(of.own, 0):
            of.chosen_at_s.popleft()
        self._drop_unused(replica_id)

    def _less_busy(self, one: str, other: str, lead: int = 0) -> str:
        loads = self._estimate(one), self._estimate(other)
        if None in loads:  # what one says and what one guesses cannot be compared
            loads = self._of(one).own, self._of(other).own
        return one if loads[0] <= loads[1] + lead else other  # type: ignore[operator]

    def _estimate(self, replica_id: str) -> int | None:
        of = self._of(replica_id)
        if of.told is None or self._clock() - of.told_at_s > STALE_S:
            return None
        return of.told + len(of.chosen_at_s)

    def _of(self, replica_id: str) -> Load:
        return self._by_replica.get(replica_id) or Load()

    def _drop_unused(self, replica_id: str) -> None:
        of = self._of(replica_id)
        if of.told is None and of.own <= 0:
            self._by_replica.pop(replica_id, None)


def home_of(conversation: bytes, replica_ids: Sequence[str]) -> str:
    """The same in every process; when replicas come or go, most conversations stay where they are."""
    return max(replica_ids, key=lambda each: hashlib.blake2b(each.encode(), key=conversation).digest())
