"""Two replicas of a stage: a call reaches the one that it names, and requests go to both."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from ray.serve.request_router import RequestRouter

from omni_cluster.cluster.transport import RemoteStage
from omni_cluster.types.errors import StageDied
from tests.served.app import PATIENCE_S, ServedApp
from tests.served.recovering import Recovering

pytestmark = pytest.mark.cluster


async def test_an_address_reaches_that_replica_and_no_other(toys: ServedApp) -> None:
    codes = RemoteStage(toys.handle("codes"))
    ids = [s["replica_id"] for s in await toys.statuses_of("codes")]
    assert len(set(ids)) == 2
    wanted = ids * 20
    reached = await asyncio.gather(*[codes.call("status", replica_id=i) for i in wanted])
    assert [s["replica_id"] for s in reached] == wanted


async def test_calls_without_an_address_go_to_both_replicas_in_turn(
    toys: ServedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Serve gives a replica 0.1 s to say how many calls it has, and passes over one that is kept from it.
    monkeypatch.setattr(RequestRouter, "queue_len_response_deadline_s", PATIENCE_S)
    codes: Any = toys.handle("codes")
    reached = await asyncio.gather(*[codes.status.remote() for _ in range(40)])
    assert sorted(Counter(s["replica_id"] for s in reached).values()) == [20, 20]


async def test_an_address_that_is_gone_fails_at_once(toys: ServedApp) -> None:
    codes = RemoteStage(toys.handle("codes"))
    with pytest.raises(StageDied, match="ReplicaUnavailableError") as called:
        await codes.call("status", replica_id="nobody")
    with pytest.raises(StageDied, match="ReplicaUnavailableError") as streamed:
        async for _ in codes.stream("rows", "of-nobody", replica_id="nobody"):
            pass
    assert called.value.replica_id == streamed.value.replica_id == "nobody"  # no other request is sent there


async def test_both_replicas_of_a_stage_did_work(toys: ServedApp, recovering: Recovering) -> None:
    before = [await recovering.requests_of(stage) for stage in ("codes", "sound")]
    await asyncio.gather(*(recovering.answer_with(recovering.short_body()) for _ in range(8)))
    after = [await recovering.requests_of(stage) for stage in ("codes", "sound")]
    assert all(now[each] > had[each] for had, now in zip(before, after, strict=True) for each in now)
