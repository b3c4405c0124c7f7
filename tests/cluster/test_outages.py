"""A stage's replica that freezes, and one that dies, as clients of the HTTP API see it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import Any

import httpx

from tests.cluster.served import BASE_URL, KEY, ServedApp, long_checkpoint, until
from tests.cluster.test_app import nothing_is_left, store_bytes, talker_runs
from tests.cluster.test_app_watchdog import all_are_replaced, process_ids

AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
CHAT = "/v1/chat/completions"
NOTICED_S = 10.0
BUSY_S = 10.0
"""What a loaded machine may add to it."""


def body_of(**options: Any) -> dict[str, Any]:
    return {
        "model": str(long_checkpoint()),
        "messages": [{"role": "user", "content": "Tell me a long story."}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "pcm16"},
        "stage_sampling_params": {"talker": {"max_tokens": 2048, "min_tokens": 2048}},
        **options,
    }


async def asked(**options: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=300, headers=AUTHORIZED) as client:
        return await client.post(CHAT, json=body_of(**options))


def died(error: dict[str, Any]) -> bool:
    return (error["error"]["code"], error["error"]["type"]) == ("stage_died", "service_unavailable_error")


def has_died(answer: httpx.Response) -> bool:
    """As a status before the first byte, and as the stream's last event after it."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        *_, last = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        return answer.status_code == 200 and died(json.loads(last.removeprefix("data: ")))
    return answer.status_code == 503 and died(answer.json())


async def at_work(watched: ServedApp) -> list[asyncio.Task[httpx.Response]]:
    """Two whole answers and two streams, which the talker works on."""
    before = (await watched.statuses_of("talker"))[0]["requests"]
    tasks = [asyncio.create_task(asked(stream=i % 2 == 0)) for i in range(4)]

    async def all_came() -> bool:
        return (await watched.statuses_of("talker"))[0]["requests"] == before + 4 and await talker_runs(watched)

    await until(all_came, "the talker has all of them")
    return tasks


async def test_a_frozen_replica_is_noticed_and_its_requests_end(watched: ServedApp) -> None:
    running = await at_work(watched)
    talker = (await process_ids(watched))["talker"]
    os.kill(talker, signal.SIGSTOP)
    began_s = time.monotonic()
    later = asyncio.create_task(asked())
    answers = await asyncio.gather(*running, later)
    assert all(map(has_died, answers)), [answer.text[-300:] for answer in answers]
    assert time.monotonic() - began_s < NOTICED_S + BUSY_S
    await all_are_replaced(watched, {"talker": talker})
    await until(lambda: nothing_is_left(watched), "all stages let go of the requests")
    answer = await asked(stage_sampling_params={"talker": {"max_tokens": 24}})
    assert answer.status_code == 200, answer.text


async def test_the_requests_of_a_replica_that_dies_end_as_such(watched: ServedApp) -> None:
    before, running = store_bytes(kept=True), await at_work(watched)
    read = [{"role": "user", "content": "word " * 6000}]
    running.append(asyncio.create_task(asked(messages=read, stream=True)))

    async def all_run() -> bool:
        return any(s["engine"]["running"] == len(running) for s in await watched.statuses_of("talker"))

    await until(all_run, "the talker follows the thinker through the long prompt")
    talker = (await process_ids(watched))["talker"]
    os.kill(talker, signal.SIGKILL)
    answers = await asyncio.gather(*running)
    assert all(map(has_died, answers)), [answer.text[-300:] for answer in answers]
    text = await asked(modalities=["text"], audio=None, stage_sampling_params={})
    assert text.status_code == 200, text.text
    await all_are_replaced(watched, {"talker": talker})
    await until(lambda: nothing_is_left(watched), "all stages let go of the requests")

    async def nothing_is_kept() -> bool:
        return store_bytes(kept=True) <= before

    await until(nothing_is_kept, "no object of the requests is kept in the store")
