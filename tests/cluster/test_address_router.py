"""The router as Serve sends it to the processes that call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ray import cloudpickle

from omni_cluster.cluster.running import known_replicas
from omni_cluster.cluster.transport import ROUTER


class Id(str):
    """As Serve names a replica."""

    @property
    def unique_id(self) -> str:
        return str(self)


def test_what_the_router_that_serve_sends_learns_is_known_to_its_process() -> None:
    sent: Any = cloudpickle.loads(ROUTER.get_serialized_request_router_cls())
    deployment = SimpleNamespace(app_name="an-app", name="a-stage")
    router = SimpleNamespace(_deployment_id=deployment, curr_replicas=dict.fromkeys([Id("b"), Id("a")]))
    assert known_replicas("an-app", "a-stage") == []
    sent._tell_running(router)
    assert known_replicas("an-app", "a-stage") == ["a", "b"]
