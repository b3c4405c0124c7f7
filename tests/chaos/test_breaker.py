"""What may be broken."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
from types import SimpleNamespace

import pytest

from tests.chaos import breaker
from tests.chaos.breaker import WAYS, dealt, possible_ways
from tests.cluster.clock import Clock

SINGLE = {"thinker": 1, "talker": 2, "code2wav": 1, "ingress": 1}


def test_a_second_node_and_an_ingress_are_broken_where_there_are_two() -> None:
    assert possible_ways(SINGLE | {"ingress": 2}, has_second_node=True) == list(WAYS)
    assert "node killed" not in possible_ways(SINGLE | {"ingress": 2}, has_second_node=False)
    assert "ingress killed" in possible_ways(SINGLE | {"ingress": 2}, has_second_node=False)


def test_the_only_ingress_is_never_broken_and_the_only_replica_of_a_stage_is() -> None:
    assert set(possible_ways(SINGLE, has_second_node=False)) == {
        "replica killed",
        "engine killed",
        "replica stopped",
        "engine stopped",
    }


@pytest.mark.parametrize("seed", range(5))
def test_ten_breaks_have_each_way_of_the_deck(seed: int) -> None:
    ways = dealt(WAYS, random.Random(seed))
    first, second = ([next(ways) for _ in WAYS] for _ in range(2))
    assert sorted(first) == sorted(second) == sorted(WAYS)
    assert first != second


def stand_still(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time passes for the breaker as it sleeps, and not otherwise."""
    clock, sleep = Clock(), asyncio.sleep

    async def pass_on(seconds: float) -> None:
        clock.now_s += seconds
        await sleep(0)

    monkeypatch.setattr(breaker, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(breaker.asyncio, "sleep", pass_on)
    return clock


@pytest.mark.parametrize(("healthy", "is_there", "is_broken"), [(1, True, True), (0, True, False), (1, False, False)])
async def test_the_only_replica_of_a_stage_is_broken_while_it_serves(
    monkeypatch: pytest.MonkeyPatch, healthy: int, is_there: bool, is_broken: bool
) -> None:
    """Serve may take a replica for healthy that has just ended."""
    asleep = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(breaker, "serving", lambda deployment: min(healthy, SINGLE[deployment]))
    monkeypatch.setattr(breaker, "WAYS", ("replica killed",))
    monkeypatch.setattr(breaker, "STAGES", ("thinker",))
    monkeypatch.setattr(breaker, "LOOK_S", 0.01)
    clock = stand_still(monkeypatch)
    there = [breaker.Replica(asleep.pid, "node")] if is_there else []
    monkeypatch.setattr(breaker, "replicas_of", lambda deployment: there)
    breaks = breaker.Breaker(nodes=None, replicas=SINGLE, every_s=0.05, seed=0)
    await breaks.run(clock() + 0.08)
    assert [(each.target, each.way) for each in breaks.breaks] == [("thinker", "replica killed")] * is_broken
    if not is_broken:
        assert asleep.poll() is None
        asleep.kill()
    assert asleep.wait(60) == -signal.SIGKILL
