"""Requests that are at work while replicas are lost."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from tests.http_app import talker_runs
from tests.served.app import BASE_URL, KEY, ServedApp, long_checkpoint, until

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
