"""Two nodes of Ray: a thinker whose model is split over both, and the other stages with a replica on each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import yaml
from ray.util.state import list_actors

from omni_cluster.vllm_engine.hosts_executor import CpuWorkerProc
from tests.http_app import assert_equals_reference, nothing_is_left
from tests.reference import KINDS
from tests.served.app import ROOT, ServedApp, request_for, serve_run_over_nodes, until

pytestmark = pytest.mark.full

PARTS = 2
IN_TURN = 8
FOLLOWING = ("talker", "code2wav")
NEW_S = 300
"""A new replica starts both of its parts."""


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApp]:
    config = yaml.safe_load((ROOT / "stage_configs" / "qwen2_5_omni_tiny.yaml").read_text())
    config["stages"][0] |= {"tensor_parallel_size": PARTS, "hosts_per_replica": 2}
    for stage in config["stages"][1:]:
        stage |= {"num_replicas": 2, "placement": {"max_replicas_per_node": 1}}
    path = tmp_path_factory.mktemp("config") / "split.yaml"
    path.write_text(yaml.safe_dump(config))
    with serve_run_over_nodes(f"config={path}", roles=("head", "second")) as app:
        yield app


def parts() -> dict[str, int]:
    """Processes that have a part of the thinker, by their node."""
    actors = list_actors(filters=[("class_name", "=", CpuWorkerProc.__name__), ("state", "=", "ALIVE")], detail=True)
    return {actor.node_id: actor.pid for actor in actors}


async def answered(split: ServedApp, name: str) -> list[Any]:
    return await asyncio.gather(*(split.answer(request_for(kind, f"{name}-{kind}", seed=7)) for kind in KINDS))


async def test_replies_equal_their_references(split: ServedApp, speak: Any) -> None:
    assert len(await asyncio.to_thread(parts)) == PARTS
    for kind, output in zip(KINDS, await answered(split, "split"), strict=True):
        assert_equals_reference(output, speak(kind, "Chelsie", 7))


async def test_what_works_on_a_request_next_is_on_the_node_of_its_source(split: ServedApp) -> None:
    (thinker,) = await split.statuses_of("thinker")
    before = await requests_by_node(split)
    for number in range(IN_TURN):
        await until(lambda: nothing_is_left(split), "the request before is gone")
        await split.answer(request_for("text", f"near-{number}"))
    after = await requests_by_node(split)
    for stage in FOLLOWING:
        taken = {node_id: count - before[stage][node_id] for node_id, count in after[stage].items()}
        print(f"{stage}: {taken[thinker['node_id']]} of {IN_TURN} on the thinker's node")
        assert len(taken) == 2 and sum(taken.values()) == taken[thinker["node_id"]] == IN_TURN


async def requests_by_node(split: ServedApp) -> dict[str, dict[str, int]]:
    """How many each replica of the following stages has had."""
    return {stage: {s["node_id"]: s["requests"] for s in await split.statuses_of(stage)} for stage in FOLLOWING}


@pytest.mark.timeout(900)
async def test_requests_outlive_the_part_on_the_other_node(split: ServedApp, speak: Any) -> None:
    before = await asyncio.to_thread(parts)
    (status,) = await split.statuses_of("thinker")
    (pid,) = [pid for node_id, pid in before.items() if node_id != status["node_id"]]
    psutil.Process(pid).kill()
    for kind, output in zip(KINDS, await answered(split, "again"), strict=True):
        assert_equals_reference(output, speak(kind, "Chelsie", 7))
    await until(lambda: nothing_is_left(split), "the new replica has let go of all requests", NEW_S)
    after = await asyncio.to_thread(parts)
    assert len(after) == PARTS and not set(after.values()) & set(before.values())
