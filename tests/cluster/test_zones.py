"""In which zone nodes are, as Ray says, and that a request stays in its zone where no replica is on its node."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RaySystemError

from omni_cluster.cluster import zones
from omni_cluster.cluster.running import Place, tell_running
from omni_cluster.cluster.transport import RemoteStage
from omni_cluster.cluster.zones import LABEL, learn_zones, zone_of

NODES = {"node-1": "a", "node-2": "a", "node-3": "b", "node-4": ""}


class Ray:
    """Says what the nodes' labels are, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers = True

    def nodes(self) -> list[dict[str, Any]]:
        self.asked += 1
        if not self.answers:
            raise RaySystemError("not now")
        return [{"NodeID": node, "Labels": {LABEL: zone} if zone else {}} for node, zone in NODES.items()]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    monkeypatch.setattr(zones, "ray", made)
    monkeypatch.setattr(zones, "_zones", {})
    return made


def learnt(*nodes: str) -> None:
    """Until it is known, or not answered."""
    learn_zones(nodes)
    for thread in threading.enumerate():
        if thread.name == zones.THREAD:
            thread.join()


def test_ray_is_asked_once_for_all_nodes_and_again_for_one_that_is_new(ray: Ray) -> None:
    assert zone_of("node-1") == ""
    learnt("node-1")
    learnt("node-2", "node-4")
    assert ([zone_of(node) for node in NODES], ray.asked) == (list(NODES.values()), 1)
    learnt("node-5")
    assert ray.asked == 2


def test_what_ray_does_not_say_is_asked_again(ray: Ray) -> None:
    ray.answers = False
    learnt("node-1")
    ray.answers = True
    assert zone_of("node-1") == ""
    learnt("node-1")
    assert (zone_of("node-1"), ray.asked) == ("a", 2)


@pytest.mark.parametrize(("source", "chosen"), [("node-1", {"x"}), ("node-3", {"y"}), ("node-4", {"x", "y"})])
def test_a_request_stays_in_its_zone_where_no_replica_is_on_its_node(ray: Ray, source: str, chosen: set[str]) -> None:
    """As Serve's open-source part says it: without a word on the zone."""
    learnt(*NODES)
    tell_running("an-app", "a-talker", {"x": Place("node-2"), "y": Place("node-3")})
    handle: Any = SimpleNamespace(app_name="an-app", deployment_name="a-talker", options=lambda **_: None)
    stage, seen = RemoteStage(handle), set()
    for _ in range(64):
        replica_id = stage.choose_replica(near=Place(source))
        assert replica_id is not None
        stage.loads.on_end(replica_id)
        seen.add(replica_id)
    assert seen == chosen
