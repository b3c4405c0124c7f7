"""The router as Serve sends it to the processes that call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ray import cloudpickle

from omni_cluster.cluster.running import Place, known_replicas, tell_running
from omni_cluster.cluster.transport import ROUTER, RemoteStage


class Id(str):
    """As Serve names a replica."""

    @property
    def unique_id(self) -> str:
        return str(self)


def test_what_the_router_that_serve_sends_learns_is_known_to_its_process() -> None:
    sent: Any = cloudpickle.loads(ROUTER.get_serialized_request_router_cls())
    deployment = SimpleNamespace(app_name="an-app", name="a-stage")
    replicas = {
        Id("b"): SimpleNamespace(node_id="a-node", availability_zone="a-zone"),
        Id("a"): SimpleNamespace(node_id=None, availability_zone=None),
    }
    router = SimpleNamespace(_deployment_id=deployment, curr_replicas=replicas)
    assert known_replicas("an-app", "a-stage") is None
    sent._tell_running(router)
    known = known_replicas("an-app", "a-stage")
    assert known is not None and list(known.items()) == [("a", Place("")), ("b", Place("a-node", "a-zone"))]


def test_a_replica_that_this_process_knows_to_be_gone_does_not_count() -> None:
    handle: Any = SimpleNamespace(app_name="an-app", deployment_name="another-stage", options=lambda **_: None)
    stage = RemoteStage(handle)
    assert stage.count_living() is None
    tell_running("an-app", "another-stage", dict.fromkeys("ab", Place("a-node")))
    assert stage.count_living() == 2
    stage.loads.lost("a")
    assert stage.count_living() == 1
    tell_running("an-app", "another-stage", {})
    assert stage.count_living() == 0
