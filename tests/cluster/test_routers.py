"""The router as Serve sends it to the processes that call."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.request_router import PendingRequest

from omni_cluster.cluster import routers
from omni_cluster.cluster.app import STAGE_ROUTER
from omni_cluster.cluster.routers import AddressRouter
from omni_cluster.cluster.transport import RemoteStage, known_replicas, set_running


class Id(str):
    """As Serve names a replica."""

    @property
    def unique_id(self) -> str:
        return str(self)


def test_what_the_router_that_serve_sends_learns_is_known_to_its_process() -> None:
    sent: Any = cloudpickle.loads(STAGE_ROUTER.get_serialized_request_router_cls())
    deployment = SimpleNamespace(app_name="an-app", name="a-stage")
    replicas = {
        Id("b"): SimpleNamespace(node_id="a-node"),
        Id("a"): SimpleNamespace(node_id=None),
    }
    router = SimpleNamespace(_deployment_id=deployment, curr_replicas=replicas)
    assert known_replicas("an-app", "a-stage") is None
    sent._publish_running(router)
    known = known_replicas("an-app", "a-stage")
    assert known is not None and list(known.items()) == [("a", ""), ("b", "a-node")]


def test_a_replica_that_this_process_knows_to_be_gone_does_not_count() -> None:
    handle: Any = SimpleNamespace(app_name="an-app", deployment_name="another-stage", options=lambda **_: None)
    stage = RemoteStage(handle)
    assert stage.count_living() is None
    set_running("an-app", "another-stage", dict.fromkeys("ab", "a-node"))
    assert stage.count_living() == 2
    stage.loads.on_loss("a")
    assert stage.count_living() == 1
    set_running("an-app", "another-stage", {})
    assert stage.count_living() == 0


@pytest.mark.parametrize(("source", "chosen"), [("node-1", {"x"}), ("node-2", {"y"}), ("node-3", {"x", "y"})])
def test_a_request_stays_on_its_node_where_a_replica_is_there_and_not_busier(source: str, chosen: set[str]) -> None:
    set_running("an-app", "a-talker", {"x": "node-1", "y": "node-2"})
    handle: Any = SimpleNamespace(app_name="an-app", deployment_name="a-talker", options=lambda **_: None)
    stage, seen = RemoteStage(handle), set()
    for _ in range(64):
        replica_id = stage.choose_replica(near_node=source)
        assert replica_id is not None
        stage.loads.on_end(replica_id)
        seen.add(replica_id)
    assert seen == chosen


class Replica:
    """What a router has of one: it takes a call unless it is full."""

    max_ongoing_requests = 1
    node_id = "a-node"
    availability_zone = None
    multiplexed_model_ids = frozenset[str]()

    def __init__(self, name: str) -> None:
        self.replica_id = Id(name)
        self.is_full = False

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return int(self.is_full)


class Router(AddressRouter):
    """With nobody to tell of replicas."""

    def __init__(self, *names: str) -> None:
        super().__init__(
            deployment_id=DeploymentID("a-stage", "an-app"),
            handle_source=DeploymentHandleSource.REPLICA,
            initial_backoff_s=0.001,
        )
        self.list(*names)

    def list(self, *names: str) -> None:
        self.update_replicas([Replica(name) for name in names])  # type: ignore[misc]

    async def choose(self, address: str = "", future: asyncio.Future[Any] | None = None) -> str:
        metadata = RequestMetadata("a-request", "one-id-for-all", session_id=address)
        pending = PendingRequest(["a-prompt"], {}, metadata, future=future or asyncio.Future())
        return str((await self._choose_replica_for_request(pending)).replica_id)

    def held(self) -> list[int]:
        return [len(each) for each in (self._pending_by_metadata, self._pending_requests_by_id)]


async def test_a_call_comes_to_the_replica_that_it_names() -> None:
    router = Router("a", "b")
    assert [await router.choose(f"@{name}") for name in "abba"] == list("abba")
    assert {await router.choose() for _ in range(2)} == {"a", "b"}
    assert router.held() == [0, 0]


async def test_a_call_to_a_replica_that_is_gone_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "LISTING_S", 600)
    router = Router("a", "b", "c")
    router.list("a", "c")
    router.on_replica_actor_died(Id("c"))
    for gone in "bc":
        with pytest.raises(ReplicaUnavailableError):
            await router.choose(f"@{gone}")
    assert router.held() == [0, 0] and await router.choose("@a") == "a"


async def test_a_call_to_a_replica_that_is_told_of_later_waits_for_it() -> None:
    router = Router("a")
    asked = asyncio.create_task(router.choose("@new"))
    while router.held() != [1, 1]:
        await asyncio.sleep(0)
    router.list("a", "new")
    assert await asked == "new" and router.held() == [0, 0]


async def test_a_call_waits_so_long_for_a_replica_that_nobody_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "LISTING_S", 0.02)
    router = Router("a")
    with pytest.raises(ReplicaUnavailableError):
        await router.choose("@never")
    assert router.held() == [0, 0]


@pytest.mark.parametrize("address", ["", "@a", "@new"])
async def test_nothing_is_kept_of_a_call_that_is_given_up_while_it_waits(address: str) -> None:
    router = Router("a")
    (replica,) = router.curr_replicas.values()
    replica.is_full = True  # type: ignore[attr-defined]
    asked = asyncio.create_task(router.choose(address))
    while router.held() != [1, 1]:
        await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    while router._routing_tasks:
        await asyncio.sleep(0)
    assert router.held() == [0, 0]


class CancelledLate(asyncio.Future[Any]):
    """As another thread cancels it: after any look whether it is done, and before it is."""

    def set_result(self, result: Any) -> None:
        self.cancel()
        super().set_result(result)

    def set_exception(self, exception: Any) -> None:
        self.cancel()
        super().set_exception(exception)


@pytest.mark.parametrize("address", ["", "@a", "@gone"])
async def test_a_call_that_another_thread_cancels_as_it_is_decided_is_passed_over(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Router, "max_num_routing_tasks", 1)  # the same task chooses for both
    router = Router("a", "gone")
    router.list("a")
    calls = router.choose(address, CancelledLate()), router.choose("@a")
    cancelled, following = await asyncio.gather(*calls, return_exceptions=True)
    while router._routing_tasks:
        await asyncio.sleep(0)
    assert isinstance(cancelled, asyncio.CancelledError) and following == "a"
    assert router.held() == [0, 0]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_the_ids_of_replicas_that_are_gone_are_bounded() -> None:
    router = Router()
    for number in range(routers.MOST_GONE + 1):
        router.list(str(number))
    router.list()
    assert len(router._gone) == routers.MOST_GONE and "0" not in router._gone
