"""What becomes of a request that was at work in two replicas when they were lost: it may be what ends them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from omni_cluster.cluster import orchestrator
from omni_cluster.cluster.loads import BROKEN_S, SILENT_S
from omni_cluster.cluster.parcel import Posted
from omni_cluster.cluster.reservation import LEASE_S, Turn
from omni_cluster.cluster.transport import ReplicaLost
from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.fan_in import StageEvent
from omni_cluster.inputs import OmniRequest
from tests.cluster.stand_ins import ANSWER, Breaks, Cluster, Stage, once, tokens_of


@pytest.fixture(autouse=True)
def asks_without_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orchestrator, "ASK_S", 0.0)


async def test_a_suspect_gets_a_third_replica_only_if_that_is_idle(tiny: Path) -> None:
    cluster = Cluster(once("talker", {"a", "b"}), talkers=("a", "b"))
    talker = cluster.stages["talker"]
    talker.loads.choose(["c"])
    asked = asyncio.create_task(cluster.ask())
    await talker.until_none_lives()
    talker.replicas.append("c")
    looks = talker.looks
    while talker.looks < looks + 10 and not asked.done():
        await asyncio.sleep(0)
    assert "c" not in talker.ran_on
    talker.loads.ended("c")
    talker.loads.forget("c")
    assert tokens_of(await asked, "talker") == ANSWER and talker.ran_on[-1] == "c"


async def test_who_lost_its_replicas_together_with_others_is_no_suspect(tiny: Path) -> None:
    """As when all that share a card end; that the others are lost may be noticed after the request's own."""
    cluster = Cluster(once("talker", {"a", "b"}), talkers=("a", "b"))
    thinker, talker = cluster.stages["thinker"], cluster.stages["talker"]
    asked = asyncio.create_task(cluster.ask())
    await talker.until_none_lives()
    thinker.loads.lost("thinker-0")
    talker.replicas += ["c", "d"]
    for each in talker.replicas[2:]:
        talker.loads.told(each, 5)
    assert tokens_of(await asked, "talker") == ANSWER and talker.ran_on[-1] in "cd"
    assert not talker.clock.now_s  # nobody was asked to keep a replica free


@pytest.mark.parametrize("rest_s", [SILENT_S, BROKEN_S])
async def test_silence_of_others_and_their_orderly_end_are_no_excuse(tiny: Path, rest_s: float) -> None:
    cluster = Cluster(once("talker", {"a", "b"}), talkers=("a", "b"))
    thinker, talker = cluster.stages["thinker"], cluster.stages["talker"]
    asked = asyncio.create_task(cluster.ask())
    await talker.until_none_lives()
    thinker.loads.lost("thinker-0", rest_s)
    talker.replicas += ["c", "d"]
    assert tokens_of(await asked, "talker") == ANSWER
    assert talker.clock.now_s  # it was


async def test_a_stage_that_loses_its_replicas_while_a_suspect_asks_for_another_s_is_waited_for(tiny: Path) -> None:
    cluster = Cluster(once("talker", {"a", "b"}), talkers=("a", "b"))
    thinker, talker = cluster.stages["thinker"], cluster.stages["talker"]
    asked = asyncio.create_task(cluster.ask())
    await talker.until_none_lives()

    async def lose_all_thinkers(*_: Any, **__: Any) -> Turn:
        for each in thinker.replicas:
            thinker.loads.lost(each)
        return Turn.FREE

    talker.call = lose_all_thinkers  # type: ignore[method-assign]
    talker.replicas += ["c", "d"]
    looks = thinker.looks
    while thinker.looks < looks + 10 and not asked.done():
        await asyncio.sleep(0)
    assert not asked.done()
    talker.call = Stage.call.__get__(talker)  # type: ignore[method-assign]
    thinker.replicas.append("new")
    assert tokens_of(await asked, "talker") == ANSWER and thinker.ran_on[-1] == "new"


async def test_nothing_is_kept_free_for_a_suspect_before_each_stage_has_a_replica(tiny: Path) -> None:
    """Else what it was given may be gone once the stages before have started."""
    cluster = Cluster(once("talker", {"a", "b"}), talkers=("a", "b"))
    thinker, talker = cluster.stages["thinker"], cluster.stages["talker"]
    asked = asyncio.create_task(cluster.ask())
    await talker.until_none_lives()
    thinker.replicas.clear()
    talker.replicas += ["c", "d"]
    while ("wake", "") not in thinker.said:
        await asyncio.sleep(0)
    assert not talker.reservation_of("c").is_held and not talker.reservation_of("d").is_held
    thinker.replicas.append("new")
    thinker.woken.set()
    assert tokens_of(await asked, "talker") == ANSWER and thinker.ran_on[-1] == "new"


LEFT = ("c", "d")
"""The talkers that are left to a suspect, once it has lost "a" and "b"."""
PATIENCE_S = 120


async def ask_without_pause(talker: Stage, number: int) -> None:
    """Another client's requests: the next one comes when one ends."""
    for turn in itertools.count():
        replica_id = talker.loads.choose(LEFT)
        asked = talker.stream("generate", OmniRequest(f"other-{number}-{turn}", "Hi."), replica_id=replica_id)
        async with contextlib.aclosing(asked):
            await anext(asked)
            for _ in range(10 + 7 * number):
                await asyncio.sleep(0)
        talker.loads.ended(replica_id)


@contextlib.asynccontextmanager
async def suspect_beside_others(breaks: Breaks, **limits: int) -> AsyncIterator[tuple[Stage, asyncio.Task[Any]]]:
    """A request that has lost two talkers, while others keep those that are left at work: the stage, and its answer."""
    cluster = Cluster(breaks, talkers=("a", "b"), **limits)
    talker = cluster.stages["talker"]
    asked = asyncio.create_task(answer_of(cluster))
    await talker.until_none_lives()
    others = [asyncio.create_task(ask_without_pause(talker, number)) for number in range(8)]
    while not all(talker.works_on(each) for each in LEFT):
        await asyncio.sleep(0)
    talker.replicas += LEFT
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield talker, asked
    finally:
        for each in (asked, *others):
            each.cancel()
        ended = await asyncio.gather(*others, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended


async def answer_of(cluster: Cluster) -> list[StageEvent]:
    sent = Posted(OmniRequest("r", "Hello."))
    async with contextlib.aclosing(cluster.orchestrator.stream(sent, Deadline(60))) as events:
        return [event async for event in events]


async def test_a_suspect_has_a_replica_alone_soon_though_all_are_kept_busy(tiny: Path) -> None:
    async with suspect_beside_others(once("talker", {"a", "b"})) as (talker, asked):
        assert tokens_of(await asked, "talker") == ANSWER
        assert talker.ran_on.count("c") > 1 and talker.ran_on.count("d") > 1
        assert not any("r-again2" in pair for pair in talker.together)
        assert not any(talker.reservation_of(each).is_held for each in LEFT)


async def test_nothing_is_kept_free_for_a_suspect_whose_replica_was_lost_too(tiny: Path) -> None:
    async with suspect_beside_others(once("talker", {"a", "b", *LEFT}), max_restarts=2) as (talker, asked):
        with pytest.raises(ReplicaLost):
            await asked
        assert "r-again2" in [each.request_id for each in talker.requests]
        assert not any(talker.reservation_of(each).is_held for each in LEFT)


async def test_nothing_is_kept_free_for_a_suspect_whose_client_leaves_while_it_runs(tiny: Path) -> None:
    async with suspect_beside_others(once("talker", {"a", "b"})) as (talker, asked):
        talker.stuck_request_id = "r-again2"
        await talker.is_stuck.wait()
        assert any(talker.reservation_of(each).is_held for each in LEFT)
        asked.cancel()
        await asyncio.wait([asked])
        assert not any(talker.reservation_of(each).is_held for each in LEFT)


async def test_nothing_is_kept_free_for_long_for_a_suspect_whose_client_leaves_while_it_waits(tiny: Path) -> None:
    async with suspect_beside_others(once("talker", {"a", "b"})) as (talker, asked):
        while not any(talker.reservation_of(each).is_held for each in LEFT):
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
        talker.clock.now_s += LEASE_S
        assert not any(talker.reservation_of(each).is_held for each in LEFT)
        assert "r-again2" not in [each.request_id for each in talker.requests]
