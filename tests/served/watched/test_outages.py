"""A stage's only replica freezes, or dies with its node: what clients of the HTTP API see of it."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from tests.http_app import nothing_is_left
from tests.processes import family, kill, running_after
from tests.served.app import ServedApp, until
from tests.served.at_work import Asking
from tests.served.leftovers import store_bytes
from tests.served.replaced import NOTICED_S, all_are_replaced, process_ids

pytestmark = pytest.mark.full


async def test_a_frozen_replica_is_noticed_and_its_requests_go_on(watched: ServedApp, asking: Asking) -> None:
    running = await asking.at_work(True, False, True, False)
    talker = (await process_ids(watched))["talker"]
    os.kill(talker, signal.SIGSTOP)
    later = asyncio.create_task(asking.asked())
    stayed = await asyncio.to_thread(running_after, [psutil.Process(talker)], NOTICED_S)
    assert not stayed
    answers = await asyncio.gather(*running, later)
    assert all(map(asking.is_whole, answers)), [answer.text[-300:] for answer in answers]
    await all_are_replaced(watched, {"talker": talker})
    await until(lambda: nothing_is_left(watched), "all stages let go of the requests")
    answer = await asking.asked(stage_sampling_params={"talker": {"max_tokens": 24}})
    assert answer.status_code == 200, answer.text


@pytest.mark.timeout(900)
async def test_the_requests_of_a_node_that_dies_go_on_on_a_new_one(watched: ServedApp, asking: Asking) -> None:
    before, running = store_bytes(kept=True), await asking.at_work(*[True] * 7)
    read = [{"role": "user", "content": "word " * 6000}]  # the eighth
    running.append(asyncio.create_task(asking.asked(messages=read, stream=True)))

    async def all_run() -> bool:
        return any(s["engine"]["running"] == len(running) for s in await watched.statuses_of("talker"))

    await until(all_run, "the talker follows the thinker through the long prompt")
    talker, nodes = (await process_ids(watched))["talker"], watched.nodes
    assert nodes is not None
    for process in family(talker):  # as a host that loses its power: Ray's own processes next
        kill(process)
    await asyncio.to_thread(nodes.kill, "talker")
    nodes.add("talker")  # in the main thread, where Ray sets signal handlers
    text = await asking.asked_in_text()
    assert text.status_code == 200, text.text
    answers = await asyncio.gather(*running)
    assert all(map(asking.is_whole, answers)), [answer.text[-300:] for answer in answers]
    await all_are_replaced(watched, {"talker": talker})
    await until(lambda: nothing_is_left(watched), "all stages let go of the requests")

    async def nothing_is_kept() -> bool:
        return store_bytes(kept=True) <= before

    await until(nothing_is_kept, "no object of the requests is kept in the store")
