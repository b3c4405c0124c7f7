"""A request that may end replicas has one alone, and soon, though others come without pause; and all others go on."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from omni_cluster.cluster.failures import lost_with
from omni_cluster.cluster.loads import SILENT_S, STALE_S, Loads
from omni_cluster.cluster.reservation import LEASE_S, SETTLE_S, Reservation, Turn
from omni_cluster.cluster.socket_server import TELL_S
from omni_cluster.cluster.suspect import ASK_S, Suspect
from omni_cluster.cluster.transport import RemoteStage, ReplicaSilent
from omni_cluster.engine.output_log import OutputLogs
from tests.cluster.clock import Clock

STEP_S = 0.05
LONGEST_S = 4.0
"""The longest of the requests that come without pause."""
RUN_S = LEASE_S + 1
"""A suspect's, once it has begun."""
BEGINS_S = LONGEST_S + SETTLE_S + TELL_S + 2 * ASK_S


class Replica:
    """A replica with no engine: its requests end at their time."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self.logs = OutputLogs(1 << 20)
        self.reservation = Reservation(self.logs, clock)
        self.is_silent = False


class Calls:
    """A stage's replicas as one ingress sees them."""

    def __init__(self, replicas: Sequence[Replica], clock: Clock, seed: int = 0) -> None:
        self.loads = Loads(clock, random.Random(seed))
        self.replicas = {each.name: each for each in replicas}

    def living(self) -> list[str] | None:
        return self.loads.living(list(self.replicas)) if self.replicas else None

    async def call(self, method: str, request_id: str, *, replica_id: str) -> Turn:
        assert method == "reserve"
        if self.replicas[replica_id].is_silent:
            raise lost_with(ReplicaSilent("no answer"), replica_id)
        return self.replicas[replica_id].reservation.ask(request_id)

    def hear_all(self) -> None:
        for each in self.replicas.values():
            self.loads.told(each.name, each.logs.unfinished, is_reserved=each.reservation.is_held)


@dataclass
class Open:
    """A request that runs: at which ingress, on which replica, until when."""

    calls: Calls
    replica: Replica
    request_id: str
    ends_s: float
    using: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


@dataclass
class Asking:
    """A suspect of an ingress, which wants a replica of each of these stages alone."""

    suspect: Suspect
    stages: dict[int, Calls]
    request_id: str
    began_s: float | None = None
    gives_up_s: float = float("inf")
    companions: int = 0


class Traffic:
    """Ingresses and the replicas of one or two stages, in time that passes in steps. Places never stay empty."""

    def __init__(self, replicas: int, *, ingresses: int = 2, stages: int = 1, places: int = 6) -> None:
        self.clock = Clock()
        self.stages = [[Replica(f"stage-{s}-{i}", self.clock) for i in range(replicas)] for s in range(stages)]
        self.ingresses = [[Calls(each, self.clock, seed=i) for each in self.stages] for i in range(ingresses)]
        self.asking: list[Asking] = []
        self.was_idle = False
        self.most_on_one = 0
        self._chance = random.Random(3)
        self._numbers = iter(range(10**9))
        self._open: list[Open] = []
        for calls in self._all_calls():
            for _ in range(places):
                self._begin(calls, self._chance.uniform(0, LONGEST_S))

    def _all_calls(self) -> Iterator[Calls]:
        return (calls for ingress in self.ingresses for calls in ingress)

    def suspect_of(self, ingress: int, name: str, stages: Sequence[int] = (0,)) -> Asking:
        asking = Asking(Suspect(name), {s: self.ingresses[ingress][s] for s in stages}, name)
        self.asking.append(asking)
        return asking

    async def go_on(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            await self._step()

    async def _step(self) -> None:
        self.clock.now_s = round(self.clock.now_s + STEP_S, 6)
        for each in [each for each in self._open if each.ends_s <= self.clock.now_s]:
            self._end(each)
        if self._is_each(TELL_S):
            for calls in self._all_calls():
                calls.hear_all()
        if self._is_each(ASK_S):
            for asking in self.asking:
                await self._ask(asking)
        self._look()

    def _is_each(self, period_s: float) -> bool:
        return round(self.clock.now_s / STEP_S) % round(period_s / STEP_S) == 0

    def _begin(self, calls: Calls, length_s: float) -> None:
        self._run(calls, calls.loads.choose(calls.living() or []), f"other-{next(self._numbers)}", length_s)

    def _run(self, calls: Calls, replica_id: str, request_id: str, length_s: float) -> Open:
        made = Open(calls, calls.replicas[replica_id], request_id, self.clock.now_s + length_s)
        made.replica.logs.open(request_id)
        made.using.enter_context(made.replica.reservation.used_by(request_id))
        self._open.append(made)
        return made

    def _end(self, ended: Open) -> None:
        self._open.remove(ended)
        ended.using.close()
        ended.replica.logs.remove(ended.request_id)
        ended.calls.loads.ended(ended.replica.name)
        if ended.request_id.startswith("other"):
            self._begin(ended.calls, self._chance.choice((0.2, 0.5, LONGEST_S)))

    async def _ask(self, asking: Asking) -> None:
        if asking.began_s is not None or self.clock.now_s >= asking.gives_up_s:
            return
        if not await asking.suspect.has_turn(cast(dict[int, RemoteStage], asking.stages)):
            return
        asking.began_s = self.clock.now_s
        for stage_id, calls in asking.stages.items():
            replica_id = asking.suspect.replicas[stage_id]
            calls.loads.chosen(replica_id)
            self._run(calls, replica_id, asking.request_id, RUN_S)

    def _look(self) -> None:
        for asking in self.asking:
            beside = [len(each.replica.logs) - 1 for each in self._open if each.request_id == asking.request_id]
            asking.companions = max([asking.companions, *beside])
        busy = [len(each.logs) for stage in self.stages for each in stage]
        self.was_idle = self.was_idle or (not any(a.began_s for a in self.asking) and 0 in busy)


@pytest.mark.parametrize("replicas", [2, 3])
async def test_a_suspect_begins_within_the_longest_request_under_a_load_without_pause(replicas: int) -> None:
    traffic = Traffic(replicas)
    await traffic.go_on(30)
    assert not traffic.was_idle  # so whoever waits for chance waits for ever
    asking, asked_s = traffic.suspect_of(0, "suspect"), traffic.clock.now_s
    await traffic.go_on(BEGINS_S)
    assert asking.began_s is not None and asking.began_s - asked_s <= BEGINS_S
    await traffic.go_on(RUN_S)
    assert asking.companions == 0


async def test_all_replicas_serve_all_again_once_the_suspect_has_ended() -> None:
    traffic = Traffic(2)
    asking = traffic.suspect_of(1, "suspect")
    await traffic.go_on(BEGINS_S + RUN_S + LONGEST_S)
    assert asking.began_s is not None and not any(each.reservation.is_held for each in traffic.stages[0])
    assert all(len(each.logs) for each in traffic.stages[0])


@pytest.mark.parametrize("replicas", [2, 3])
async def test_two_suspects_of_two_ingresses_have_a_replica_each_or_one_after_another(replicas: int) -> None:
    traffic = Traffic(replicas)
    await traffic.go_on(5)
    asking, asked_s = [traffic.suspect_of(0, "one"), traffic.suspect_of(1, "two")], traffic.clock.now_s
    seen: list[int] = []
    for _ in range(round((2 * BEGINS_S + RUN_S) / STEP_S)):
        await traffic.go_on(STEP_S)
        seen.append(sum(each.reservation.is_held for each in traffic.stages[0]))
    assert max(seen) == replicas - 1  # one is left to all others
    assert all(each.began_s is not None and each.companions == 0 for each in asking)
    last_s = max(each.began_s or 0 for each in asking) - asked_s
    assert last_s <= (BEGINS_S if replicas == 3 else 2 * BEGINS_S + RUN_S)


async def test_two_suspects_that_need_two_stages_do_not_wait_for_each_other() -> None:
    """The first has the second stage, the second the first one and waits; the third asks before it when that ends."""
    traffic = Traffic(2, ingresses=3, stages=2)
    traffic.suspect_of(0, "one", [1])
    await traffic.go_on(1)
    traffic.suspect_of(1, "two", [0, 1])
    await traffic.go_on(1)
    traffic.suspect_of(2, "three", [0, 1])
    traffic.asking.reverse()
    await traffic.go_on(3 * (2 * BEGINS_S + RUN_S))
    assert all(each.began_s is not None and each.companions == 0 for each in traffic.asking)


async def test_of_two_that_have_asked_for_both_replicas_at_once_one_gives_its_own_up() -> None:
    traffic = Traffic(2)
    await traffic.go_on(5)
    one, two = traffic.suspect_of(0, "one"), traffic.suspect_of(1, "two")
    first, second = traffic.stages[0]
    traffic.ingresses[0][0].loads.told(second.name, 99)  # so each takes another one for the less busy
    traffic.ingresses[1][0].loads.told(first.name, 99)
    for each in (one, two):
        assert not await each.suspect.has_turn(cast(dict[int, RemoteStage], each.stages))
    assert first.reservation.is_held and second.reservation.is_held
    await traffic.go_on(LEASE_S + TELL_S)
    assert [first.reservation.is_held, second.reservation.is_held] == [True, False]
    await traffic.go_on(2 * BEGINS_S + RUN_S)
    assert all(each.began_s is not None and each.companions == 0 for each in (one, two))


async def test_what_a_suspect_leaves_that_gave_up_is_free_for_the_next() -> None:
    traffic = Traffic(2)
    await traffic.go_on(5)
    left = traffic.suspect_of(0, "left")
    left.gives_up_s = traffic.clock.now_s + 1
    await traffic.go_on(1)
    assert any(each.reservation.is_held for each in traffic.stages[0])
    waits = traffic.suspect_of(1, "waits")
    await traffic.go_on(LEASE_S + BEGINS_S)
    assert left.began_s is None and waits.began_s is not None


# ------------------------------------------------------------ one step of it


def calls_of(*names: str) -> tuple[Calls, list[Replica], Clock]:
    clock = Clock()
    replicas = [Replica(name, clock) for name in names]
    return Calls(replicas, clock), replicas, clock


async def has_turn(suspect: Suspect, *stages: Calls) -> bool:
    return await suspect.has_turn(cast(dict[int, RemoteStage], dict(enumerate(stages))))


async def test_the_only_replica_is_kept_free_for_nobody_and_must_be_idle() -> None:
    calls, (only,), _ = calls_of("only")
    suspect = Suspect("s")
    calls.loads.told("only", 1)
    assert not await has_turn(suspect, calls) and not only.reservation.is_held
    calls.loads.told("only", 0)
    assert await has_turn(suspect, calls) and suspect.replicas == {0: "only"}
    assert not only.reservation.is_held


async def test_so_is_the_last_that_lives() -> None:
    calls, (_, other), _ = calls_of("lost", "other")
    calls.loads.lost("lost")
    assert await has_turn(Suspect("s"), calls) and not other.reservation.is_held


async def test_a_stage_that_has_lost_all_is_asked_for_nothing() -> None:
    calls, _, _ = calls_of("lost")
    calls.loads.lost("lost")
    suspect = Suspect("s")
    assert not await has_turn(suspect, calls) and suspect.replicas == {}


async def test_a_stage_of_which_nobody_is_known_here_is_left_to_serve() -> None:
    calls, _, _ = calls_of()
    suspect = Suspect("s")
    assert await has_turn(suspect, calls) and suspect.replicas == {}


async def test_a_replica_that_does_not_answer_rests_and_another_one_is_asked() -> None:
    calls, (a, b, _), clock = calls_of("a", "b", "c")
    a.is_silent = True
    suspect = Suspect("s")
    assert not await has_turn(suspect, calls) and calls.living() == ["b", "c"]
    assert not await has_turn(suspect, calls) and suspect.replicas == {0: "b"} and b.reservation.is_held
    clock.now_s = SILENT_S
    assert calls.living() == ["a", "b", "c"]


async def test_a_replica_that_was_lost_meanwhile_is_not_asked_for_again() -> None:
    calls, (a, b, _), _ = calls_of("a", "b", "c")
    suspect = Suspect("s")
    await has_turn(suspect, calls)
    assert a.reservation.is_held
    calls.loads.lost("a")
    await has_turn(suspect, calls)
    assert suspect.replicas == {0: "b"} and b.reservation.is_held


async def test_a_later_stage_is_not_kept_free_while_an_earlier_one_is_another_s() -> None:
    first, (a, _), _ = calls_of("a", "b")
    second, later, _ = calls_of("c", "d")
    a.reservation.ask("another")
    assert not await has_turn(Suspect("s"), first, second)
    assert not any(each.reservation.is_held for each in later)


async def test_nothing_is_kept_free_while_the_only_replica_of_another_stage_is_at_work() -> None:
    first, pair, _ = calls_of("a", "b")
    second, _, _ = calls_of("only")
    second.loads.told("only", 1)
    assert not await has_turn(Suspect("s"), first, second)
    assert not any(each.reservation.is_held for each in pair)
    second.loads.told("only", 0)
    await has_turn(Suspect("s"), first, second)
    assert pair[0].reservation.is_held


async def test_a_replica_that_is_the_only_one_since_the_suspect_asked_elsewhere_must_be_idle_too() -> None:
    first, _, _ = calls_of("a", "b")
    second, _, _ = calls_of("lost", "left")
    suspect = Suspect("s")

    async def lose_one(*_: Any, **__: Any) -> Turn:
        second.loads.lost("lost")
        second.loads.told("left", load)
        return Turn.FREE

    first.call = lose_one  # type: ignore[method-assign]
    load = 1
    assert not await has_turn(suspect, first, second)
    load = 0
    second.loads.told("left", 0)
    assert await has_turn(suspect, first, second)


async def test_whoever_is_told_that_another_has_it_brings_nothing_there() -> None:
    calls, (a, _), clock = calls_of("a", "b")
    a.reservation.ask("another")
    await has_turn(Suspect("s"), calls)
    assert {calls.loads.choose(["a", "b"]) for _ in range(8)} == {"b"}
    clock.now_s = STALE_S
    assert calls.loads.choose(["a", "b"]) == "a"


async def test_a_call_that_is_cancelled_asks_for_no_more() -> None:
    calls, (a, _), _ = calls_of("a", "b")
    begun, suspect = asyncio.Event(), Suspect("s")

    async def hangs(*_: Any, **__: Any) -> Turn:
        begun.set()
        await asyncio.Event().wait()
        return Turn.BUSY

    calls.call = hangs  # type: ignore[method-assign]
    asking = asyncio.create_task(has_turn(suspect, calls))
    await begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert suspect.replicas == {} and not a.reservation.is_held
