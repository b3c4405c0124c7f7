"""A stage's only replica freezes, or dies with its node: what clients of the HTTP API see of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import httpx
import psutil
import pytest

from tests.cluster.leftovers import store_bytes
from tests.cluster.served import BASE_URL, KEY, ServedApp, long_checkpoint, until
from tests.cluster.test_app import nothing_is_left, talker_runs
from tests.cluster.test_app_watchdog import NOTICED_S, all_are_replaced, process_ids
from tests.processes import family, kill, running_after

AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
CHAT = "/v1/chat/completions"
CODES = 1024
ANSWERED_S = 400.0
"""A new replica starts meanwhile, beside others that compute."""


def body_of(**options: Any) -> dict[str, Any]:
    return {
        "model": str(long_checkpoint()),
        "messages": [{"role": "user", "content": "Tell me a long story."}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "pcm16"},
        "stage_sampling_params": {"talker": {"max_tokens": CODES, "min_tokens": CODES}},
        **options,
    }


async def asked(**options: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=ANSWERED_S, headers=AUTHORIZED) as client:
        return await client.post(CHAT, json=body_of(**options))


def is_whole(answer: httpx.Response) -> bool:
    """An answer with all of its sound, as a stream or at once."""
    if answer.status_code != 200:
        return False
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return bool(answer.json()["omni"]["stages"]["talker"]["tokens"] == CODES)
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    timings = [said for line in lines if (said := json.loads(line.removeprefix("data: ")).get("omni"))]
    return answer.text.endswith("data: [DONE]\n\n") and timings[-1]["stages"]["talker"]["tokens"] == CODES


async def at_work(watched: ServedApp, *stream: bool) -> list[asyncio.Task[httpx.Response]]:
    """Requests that the talker works on, and whether each is a stream."""
    wanted = (await watched.statuses_of("talker"))[0]["requests"] + len(stream)
    tasks = [asyncio.create_task(asked(stream=each)) for each in stream]

    async def all_came() -> bool:
        return (await watched.statuses_of("talker"))[0]["requests"] == wanted and await talker_runs(watched)

    await until(all_came, "the talker has all of them")
    return tasks


async def test_a_frozen_replica_is_noticed_and_its_requests_go_on(watched: ServedApp) -> None:
    running = await at_work(watched, True, False, True, False)
    talker = (await process_ids(watched))["talker"]
    os.kill(talker, signal.SIGSTOP)
    later = asyncio.create_task(asked())
    stayed = await asyncio.to_thread(running_after, [psutil.Process(talker)], NOTICED_S)
    assert not stayed
    answers = await asyncio.gather(*running, later)
    assert all(map(is_whole, answers)), [answer.text[-300:] for answer in answers]
    await all_are_replaced(watched, {"talker": talker})
    await until(lambda: nothing_is_left(watched), "all stages let go of the requests")
    answer = await asked(stage_sampling_params={"talker": {"max_tokens": 24}})
    assert answer.status_code == 200, answer.text


@pytest.mark.timeout(900)
async def test_the_requests_of_a_node_that_dies_go_on_on_a_new_one(watched: ServedApp) -> None:
    before, running = store_bytes(kept=True), await at_work(watched, *[True] * 7)
    read = [{"role": "user", "content": "word " * 6000}]  # the eighth
    running.append(asyncio.create_task(asked(messages=read, stream=True)))

    async def all_run() -> bool:
        return any(s["engine"]["running"] == len(running) for s in await watched.statuses_of("talker"))

    await until(all_run, "the talker follows the thinker through the long prompt")
    talker, nodes = (await process_ids(watched))["talker"], watched.nodes
    assert nodes is not None
    for process in family(talker):  # as a host that loses its power: Ray's own processes next
        kill(process)
    await asyncio.to_thread(nodes.kill, "talker")
    nodes.add("talker")  # in the main thread, where Ray sets signal handlers
    text = await asked(modalities=["text"], audio=None, stage_sampling_params={})
    assert text.status_code == 200, text.text
    answers = await asyncio.gather(*running)
    assert all(map(is_whole, answers)), [answer.text[-300:] for answer in answers]
    await all_are_replaced(watched, {"talker": talker})
    await until(lambda: nothing_is_left(watched), "all stages let go of the requests")

    async def nothing_is_kept() -> bool:
        return store_bytes(kept=True) <= before

    await until(nothing_is_kept, "no object of the requests is kept in the store")
