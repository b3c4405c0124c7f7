"""A node dies with the only replica of a stage."""

from __future__ import annotations

import asyncio

import pytest

from tests.http_app import nothing_is_left
from tests.processes import family, kill
from tests.served.app import ServedApp, until
from tests.served.leftovers import store_bytes
from tests.served.recovering import Recovering
from tests.served.replaced import all_are_replaced, process_ids

pytestmark = pytest.mark.cluster

STREAMS = 6


async def test_the_requests_of_a_node_that_dies_go_on_on_a_new_one(
    toy_nodes: ServedApp, recovering: Recovering
) -> None:
    long = {"codes": {"max_tokens": 800, "min_tokens": 800}}  # none ends before all are there
    before, body = store_bytes(kept=True), recovering.body(stage_sampling_params=long)
    expected = await recovering.undisturbed(body)
    running = [asyncio.create_task(recovering.answer_with(body)) for _ in range(STREAMS)]

    async def all_run() -> bool:
        return any(status["engine"]["running"] == STREAMS for status in await toy_nodes.statuses_of("codes"))

    await until(all_run, "all streams are in the second stage")
    codes, nodes = (await process_ids(toy_nodes))["codes"], toy_nodes.nodes
    assert nodes is not None
    for process in family(codes):  # as a host that loses its power: Ray's own processes next
        kill(process)
    await asyncio.to_thread(nodes.kill, "codes")
    text = recovering.body(modalities=["text"], audio=None, stage_sampling_params={})
    answer = await asyncio.to_thread(toy_nodes.client.post, "/v1/chat/completions", json=text)
    assert answer.status_code == 200, answer.text
    nodes.add("codes")  # in the main thread, where Ray sets signal handlers
    for heard in await asyncio.gather(*running):
        recovering.assert_same(heard, expected)
    await all_are_replaced(toy_nodes, {"codes": codes})
    await until(lambda: nothing_is_left(toy_nodes), "all stages let go of the requests")

    async def nothing_is_kept() -> bool:
        return store_bytes(kept=True) <= before

    await until(nothing_is_kept, "no object of the requests is kept in the store")
