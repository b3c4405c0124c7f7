"""Ray's autoscaler (v2) with the node types of the file for AWS: nodes come for replicas, and go with them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.served.app import ServedApp, serve_run_on, until
from tests.served.autoscaled import CARD, HEAD, AutoscaledCluster, autoscaled, shipped_types
from tests.served.autoscaling_promises import CLIENTS, SCALED_S, Load, until_running
from tests.served.recovering import Recovering
from tests.served.toy_config import toy_config

pytestmark = [pytest.mark.full, pytest.mark.cluster]

LENGTHS = {"text": 40, "codes": 200}
MOST = 2
NODE_TYPES = dict(zip(("text", "codes", "sound"), ("thinker", "talker", "code2wav"), strict=True))
"""Of the file, by the toy's stage that runs there."""
GROWS = "talker"


def one_of_each() -> Counter[str]:
    return Counter([HEAD, *NODE_TYPES.values()])


def growing_config() -> dict[str, Any]:
    """Each stage on its node type, where a replica fills a card; the codes follow a load. The head has the ingress."""
    config = toy_config()
    for stage in config["stages"]:
        node_type = NODE_TYPES[stage["model_stage"]]
        stage["advanced"]["placement"] = {"label_selector": {"stage": node_type}, "resources": {CARD: 1}}
    follows = {"min_replicas": 1, "upscale_delay_s": 1, "downscale_delay_s": 5}
    signals = {"max_backlog_tokens": 1.5 * LENGTHS["codes"]}
    config["stages"][1]["autoscaling"] = follows | {"max_replicas": MOST, "signals": signals}
    return config


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AutoscaledCluster]:
    with autoscaled(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


async def until_nodes(cluster: AutoscaledCluster, expected: Mapping[str, int]) -> None:
    async def are_there() -> bool:
        return await asyncio.to_thread(cluster.nodes) == expected

    await until(are_there, f"the nodes are {dict(expected)}", SCALED_S)


async def grows_and_shrinks(app: ServedApp, cluster: AutoscaledCluster) -> None:
    """While clients come and go. Each has its answer, exactly."""
    recovering = Recovering(app, LENGTHS, LENGTHS, voice="high", tolerance=0)
    expected = await recovering.undisturbed(recovering.body())
    load = Load(recovering, recovering.body(), expected)
    async with contextlib.aclosing(load):
        load.be(CLIENTS)
        await until_running(app, "codes", MOST)
        assert await asyncio.to_thread(cluster.nodes) == one_of_each() + Counter([GROWS])
        assert len({status["node_id"] for status in await app.living("codes")}) == MOST
        await load.until_answered(CLIENTS)
        load.be(1)
        await until_running(app, "codes", 1)
        await until_nodes(cluster, one_of_each())
        await load.until_answered(1)
    assert not load.lost


@pytest.mark.timeout(1800)
async def test_nodes_come_for_replicas_and_go_with_them(cluster: AutoscaledCluster, tmp_path: Path) -> None:
    assert "autoscaler/v2" in cluster.autoscaler()
    assert {shipped_types()[name]["max_workers"] for name in NODE_TYPES.values()} == {1, MOST}
    assert cluster.nodes() == {HEAD: 1}
    path = tmp_path / "growing.yaml"
    path.write_text(yaml.safe_dump(growing_config()))
    with serve_run_on(cluster.address, f"config={path}") as app:
        assert await asyncio.to_thread(cluster.nodes) == one_of_each()
        await grows_and_shrinks(app, cluster)
    await until_nodes(cluster, {HEAD: 1})
