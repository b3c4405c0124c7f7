"""Who is asked before a request begins, and what becomes of it when what works on it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import weakref
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_cluster.cluster import orchestrator
from omni_cluster.cluster.failures import lost_with
from omni_cluster.cluster.loads import LOST_COOLDOWN_S, SILENT_COOLDOWN_S
from omni_cluster.cluster.staged import StagedRequest
from omni_cluster.cluster.transport import ReplicaSilent, Ticket
from omni_cluster.engine.deadline import Deadline, DeadlineExceeded
from omni_cluster.engine.recovery import MOST_FREE, AnswerDiffers
from omni_cluster.types.errors import RequestError, RequestGone, StageDied
from omni_cluster.types.inputs import Media, OmniRequest
from omni_cluster.types.outputs import StageChunk
from tests.cluster.stand_ins import ANSWER, CHUNKS, STAGES, Cluster, once, recovered_from, tokens_of


async def test_each_stage_is_asked_for_a_replica_near_the_one_that_feeds_it(tiny: Path) -> None:
    cluster = Cluster()
    await cluster.ask()
    near = {name: stage.asked_near for name, stage in cluster.stages.items()}
    ran_on = {name: stage.ran_on[0] for name, stage in cluster.stages.items()}
    assert near == {
        "thinker": [None],
        "talker": [f"node of {ran_on['thinker']}"],
        "code2wav": [f"node of {ran_on['talker']}"],
    }


# ------------------------------------------------------------ stages that sleep


def with_asleep(*names: str) -> Cluster:
    cluster = Cluster()
    for name in names:
        cluster.stages[name].replicas.clear()
    return cluster


async def test_all_stages_that_sleep_are_woken_at_once_and_text_does_not_wait_for_them(tiny: Path) -> None:
    cluster = with_asleep("talker", "code2wav")
    talker, code2wav = cluster.stages["talker"], cluster.stages["code2wav"]
    events = cluster.events()
    said = [await anext(events) for _ in range(2)]
    assert tokens_of(said, "thinker") == ANSWER
    assert set(talker.said) == {("wake", ""), ("generate", "r")} and code2wav.said == [("wake", "")]
    talker.woken.set()
    code2wav.woken.set()
    said += [event async for event in events]
    assert {name: tokens_of(said, name) for name in STAGES} == dict.fromkeys(STAGES, ANSWER)
    assert cluster.stages["thinker"].said == [("generate", "r")]


async def test_no_stage_begins_before_the_first_has_a_replica(tiny: Path) -> None:
    """One that is begun waits for its source for seconds alone, and an engine takes longer to start."""
    cluster = with_asleep("thinker")
    thinker, talker, code2wav = cluster.stages.values()
    asking = asyncio.create_task(cluster.ask())
    while ("generate", "r") not in thinker.said:
        await asyncio.sleep(0)
    for _ in range(20):  # all that could begin has begun
        await asyncio.sleep(0)
    assert talker.said == code2wav.said == []
    thinker.woken.set()
    assert tokens_of(await asking, "code2wav") == ANSWER


async def test_a_replica_that_is_replaced_while_the_first_stage_starts_is_no_loss(tiny: Path) -> None:
    """Requests wait for a thinker for a minute, in which the code2wav that was there when they came may go."""
    cluster = with_asleep("thinker")
    thinker, code2wav = cluster.stages["thinker"], cluster.stages["code2wav"]
    asking = asyncio.create_task(cluster.ask())
    while ("generate", "r") not in thinker.said:
        await asyncio.sleep(0)
    code2wav.loads.on_loss("code2wav-0")
    code2wav.loads.on_loss("code2wav-1")
    thinker.woken.set()
    while not cluster.stages["talker"].ran_on:
        await asyncio.sleep(0)
    assert not code2wav.ran_on and not asking.done()
    code2wav.replicas[:] = ["new"]
    events = await asking
    assert code2wav.ran_on == ["new"] and not any(event.recovery for event in events)
    assert tokens_of(events, "code2wav") == ANSWER


async def test_a_stage_behind_one_that_starts_is_not_woken_where_it_is_up(tiny: Path) -> None:
    cluster = with_asleep("thinker")
    cluster.stages["thinker"].woken.set()
    await cluster.ask()
    assert cluster.stages["talker"].said == cluster.stages["code2wav"].said == [("generate", "r")]


async def test_a_request_for_text_wakes_nobody(tiny: Path) -> None:
    cluster = with_asleep("talker", "code2wav")
    await cluster.ask(wants_audio=False)
    assert cluster.stages["talker"].said == cluster.stages["code2wav"].said == []


async def test_a_stage_that_does_not_wake_is_waited_for_no_longer_than_the_request_has(tiny: Path) -> None:
    with pytest.raises(DeadlineExceeded):
        await with_asleep("thinker").ask(deadline_s=0.3)


# ------------------------------------------------------------ the end


async def test_a_whole_answer_s_calls_end_by_themselves_and_that_of_a_client_that_leaves_does_not(tiny: Path) -> None:
    cluster = Cluster()
    stages = cluster.stages.values()
    await cluster.ask()
    while any(each.works_on(replica_id) for each in stages for replica_id in each.replicas):
        await asyncio.sleep(0)
    assert [each.done for each in stages] == [["r"], ["r"], ["r"]]
    async with contextlib.aclosing(cluster.events()) as events:
        await anext(events)
    assert not any(each.works_on(replica_id) for each in stages for replica_id in each.replicas)
    assert [each.done for each in stages] == [["r"], ["r"], ["r"]]


async def test_a_replica_that_does_not_end_its_call_has_it_cancelled(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orchestrator, "END_S", 0.01)
    cluster = Cluster()
    talker = cluster.stages["talker"]

    async def unheard(ticket: Ticket) -> bool:
        return True

    monkeypatch.setattr(talker, "end", unheard)
    await cluster.ask()
    async with asyncio.timeout(60):
        while any(talker.works_on(replica_id) for replica_id in talker.replicas):
            await asyncio.sleep(0.001)
    assert not talker.done


# ------------------------------------------------------------ a lost replica


@pytest.mark.parametrize("stage", STAGES)
async def test_a_request_goes_on_where_it_was_without_the_replica_that_was_lost(tiny: Path, stage: str) -> None:
    cluster = Cluster(once(stage))
    events = await cluster.ask()
    assert {name: tokens_of(events, name) for name in STAGES} == dict.fromkeys(STAGES, ANSWER)
    first, second = cluster.stages[stage].ran_on
    assert first != second
    # The talker had said all when code2wav was lost: it says it again, and needs no thinker.
    again = [name for name in STAGES if cluster.stages[name].requests[-1].request_id == "r-again1"]
    assert again == list(STAGES[1:] if stage == "code2wav" else STAGES)
    assert cluster.stages[stage].requests[-1].known[stage].token_ids == ANSWER[:3]
    assert recovered_from(events) == [(stage,)]
    later = [cluster.stages[stage].choose_replica() for _ in range(8)]
    assert first not in later  # no other request is brought there either


@pytest.mark.parametrize("stage", STAGES)
async def test_a_request_that_loses_a_replica_before_it_said_anything_just_runs_again(tiny: Path, stage: str) -> None:
    cluster = Cluster(once(stage))
    cluster.stages[stage].breaks_after = 0
    events = await cluster.ask()
    assert {name: tokens_of(events, name) for name in STAGES} == dict.fromkeys(STAGES, ANSWER)
    assert stage not in cluster.stages[stage].requests[-1].known and recovered_from(events) == [(stage,)]


@pytest.mark.parametrize("stage", STAGES)
async def test_a_replica_that_is_lost_once_all_that_it_made_is_here_is_no_loss(tiny: Path, stage: str) -> None:
    """However long the other stages still work."""
    cluster = Cluster(once(stage))
    cluster.stages[stage].breaks_after = len(CHUNKS)
    events = await cluster.ask()
    assert {name: tokens_of(events, name) for name in STAGES} == dict.fromkeys(STAGES, ANSWER)
    assert [len(each.requests) for each in cluster.stages.values()] == [1, 1, 1] and not recovered_from(events)


async def test_replicas_that_were_gone_already_use_up_no_restart(tiny: Path) -> None:
    """As when a host dies with replicas of two stages: the ingress learns of one after the other."""
    cluster = Cluster(once("thinker"), talkers=("a", "b", "c"), max_restarts=1)
    talker = cluster.stages["talker"]
    asked = asyncio.create_task(cluster.ask())
    while not talker.ran_on:
        await asyncio.sleep(0)
    talker.gone = set(talker.replicas)
    talker.loads.on_loss(talker.ran_on[0])
    while talker.can_choose():
        await asyncio.sleep(0)
    talker.replicas += ["d", "e"]
    events = await asked
    assert tokens_of(events, "talker") == ANSWER
    assert sum(recovered_from(events), ()) == ("thinker",)
    assert [replica in gone for replica, gone in zip(talker.ran_on, ("abc", "de"), strict=True)] == [True, True]
    assert [method for method, _ in talker.said] == ["generate"] * 4  # two of them met replicas that were gone


async def test_a_call_that_no_replica_had_taken_uses_up_no_restart(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve was to choose one, and said that there is none any more."""
    monkeypatch.setattr(orchestrator, "REFUSED_S", 0.0)
    cluster = with_asleep("thinker")
    thinker = cluster.stages["thinker"]
    begin, refused = thinker.stream, 0

    async def stream(*args: Any, replica_id: str) -> AsyncGenerator[Any, None]:
        nonlocal refused
        if not replica_id and refused < MOST_FREE:
            refused += 1
            thinker.replicas[:] = ["up"] if refused == MOST_FREE else []
            raise StageDied("there is no replica")
        async with contextlib.aclosing(begin(*args, replica_id=replica_id)) as tickets:
            async for ticket in tickets:
                yield ticket

    thinker.stream = stream  # type: ignore[method-assign]
    events = await cluster.ask()
    assert tokens_of(events, "talker") == ANSWER and refused == MOST_FREE
    assert not recovered_from(events)


@pytest.mark.parametrize(("kind", "cooldown_s"), [(StageDied, LOST_COOLDOWN_S), (ReplicaSilent, SILENT_COOLDOWN_S)])
async def test_a_replica_that_only_did_not_answer_soon_gets_requests_again(
    tiny: Path, kind: type[StageDied], cooldown_s: float
) -> None:
    cluster = Cluster(once("talker", kind=kind))
    before_s = time.monotonic()
    await cluster.ask()
    (until_s,) = cluster.stages["talker"].loads._cool_at_s.values()
    assert before_s + cooldown_s <= until_s <= time.monotonic() + cooldown_s


async def test_two_losses_of_one_request(tiny: Path) -> None:
    cluster = Cluster(once("talker", {"a", "b"}), talkers=("a", "b"))
    asked = asyncio.create_task(cluster.ask())
    talker = cluster.stages["talker"]
    await talker.until_none_lives()
    talker.replicas.append("c")
    assert tokens_of(await asked, "talker") == ANSWER
    assert talker.ran_on[-1] == "c" and set(talker.ran_on) == {"a", "b", "c"}


async def test_replicas_that_are_lost_together_with_another_request_s_use_up_one_restart(tiny: Path) -> None:
    """As when all that share a card end."""
    losses = [once("thinker"), once("talker", {"a", "b"})]
    cluster = Cluster(lambda name, ticket: losses[0](name, ticket), talkers=("a", "b"), max_restarts=1)
    await cluster.ask()
    losses.pop(0)
    asked = asyncio.create_task(cluster.ask())
    talker = cluster.stages["talker"]
    await talker.until_none_lives()
    talker.replicas.append("c")
    assert tokens_of(await asked, "talker") == ANSWER and talker.ran_on[-1] == "c"


async def test_what_a_consumer_says_of_its_source_is_the_source_s_loss(tiny: Path) -> None:
    lost: list[str] = []

    def breaks(name: str, ticket: Ticket) -> Exception | None:
        if name != "talker" or lost:
            return None
        lost.append(cluster.stages["thinker"].ran_on[-1])
        return lost_with(StageDied("the connection broke"), lost[0])

    cluster = Cluster(breaks)
    events = await cluster.ask()
    assert recovered_from(events) == [("thinker",)]
    assert cluster.stages["thinker"].ran_on[-1] != lost[0]


async def test_the_reason_why_a_replica_ended_the_request_is_waited_for(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orchestrator, "CAUSE_S", 60.0)
    seen: set[str] = set()

    def breaks(name: str, ticket: Ticket) -> Exception | None:
        if name == "code2wav" or name in seen:
            return None
        seen.add(name)
        return RequestGone("it ended") if name == "thinker" else lost_with(StageDied("gone"), ticket.replica_id)

    cluster = Cluster(breaks)
    events = await cluster.ask()
    assert recovered_from(events) == [("talker",)]


async def test_without_a_reason_nobody_is_blamed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orchestrator, "CAUSE_S", 0.0)
    cluster = Cluster(once("talker", None, RequestGone))
    events = await cluster.ask()
    assert recovered_from(events) == [("unknown",)]
    assert len(cluster.stages["talker"].loads.living(["talker-0", "talker-1"])) == 2


@pytest.mark.parametrize("most", [0, 2])
async def test_it_ends_when_it_was_begun_again_so_often(tiny: Path, most: int) -> None:
    replicas = tuple(f"replica-{i}" for i in range(6))
    cluster = Cluster(once("talker", set(replicas)), talkers=replicas, max_restarts=most)
    with pytest.raises(StageDied):
        await cluster.ask()
    assert len(set(cluster.stages["talker"].ran_on)) == most + 1


async def test_an_error_of_the_request_begins_nothing_again(tiny: Path) -> None:
    cluster = Cluster(lambda name, _: RequestError("a bad field") if name == "talker" else None)
    with pytest.raises(RequestError):
        await cluster.ask()
    assert len(cluster.stages["talker"].requests) == 1


async def test_an_answer_that_does_not_go_on_is_not_tried_again(tiny: Path) -> None:
    cluster = Cluster(once("thinker"))
    answer = cluster.stages["thinker"].read

    async def another(ticket: Ticket, *, with_rows: bool) -> AsyncGenerator[StageChunk, None]:
        if ticket.request_id == "r":
            async for chunk in answer(ticket, with_rows=with_rows):
                yield chunk
        yield StageChunk(0, (9, 9, 9), "zzz")

    cluster.stages["thinker"].read = another  # type: ignore[method-assign]
    with pytest.raises(AnswerDiffers):
        await cluster.ask()
    assert len(cluster.stages["thinker"].requests) == 2


async def test_nothing_is_begun_again_for_a_client_that_left(tiny: Path) -> None:
    cluster = Cluster(lambda name, _: RequestGone("Serve ended the call") if name == "talker" else None)
    events = cluster.events()
    await anext(events)
    await events.aclose()
    assert all(len(each.requests) == 1 for each in cluster.stages.values())


async def test_nothing_is_begun_again_for_a_client_that_leaves_while_a_replica_is_waited_for(tiny: Path) -> None:
    cluster = Cluster(once("talker", {"old"}), talkers=("old",))
    asked = asyncio.create_task(cluster.ask())
    talker = cluster.stages["talker"]
    await talker.until_none_lives()
    talker.replicas.append("new")  # nobody has looked for it yet
    asked.cancel()
    await asyncio.wait([asked])
    assert asked.cancelled() and talker.ran_on == ["old"]
    assert all(each.is_free and [one.request_id for one in each.requests] == ["r"] for each in cluster.stages.values())
    assert not any(each.works_on(name) for each in cluster.stages.values() for name in each.replicas)


async def test_the_only_replica_s_successor_is_waited_for(tiny: Path) -> None:
    cluster = Cluster(once("talker", {"old"}), talkers=("old",))
    asked = asyncio.create_task(cluster.ask())
    talker = cluster.stages["talker"]
    await talker.until_none_lives()
    assert not asked.done()
    talker.replicas.append("new")
    assert tokens_of(await asked, "talker") == ANSWER and talker.ran_on == ["old", "new"]


async def test_it_is_waited_for_no_longer_than_the_request_has(tiny: Path) -> None:
    cluster = Cluster(once("talker", {"only"}), talkers=("only",))
    with pytest.raises(DeadlineExceeded):
        await cluster.ask(deadline_s=0.3)


async def test_media_that_are_carried_go_to_the_first_stage_whenever_the_request_begins(tiny: Path) -> None:
    cluster, media = Cluster(once("thinker")), Media((np.zeros(160, np.float32),))
    await cluster.ask(carried=media)
    sent = {name: [request.media for request in stage.requests] for name, stage in cluster.stages.items()}
    assert sent["thinker"] == [media, media] and set(map(id, sent["thinker"])) == {id(media)}
    assert all(each == Media() for name in ("talker", "code2wav") for each in sent[name])


async def test_a_request_that_ended_holds_nothing(tiny: Path) -> None:
    cluster = Cluster(once("talker"))
    sent = StagedRequest(OmniRequest("r", "Hello."))
    async with contextlib.aclosing(cluster.orchestrator.stream(contextlib.nullcontext(sent), Deadline(60))) as events:
        async for _ in events:
            pass
    kept = weakref.ref(sent)
    del sent, events
    gc.collect()
    assert kept() is None
