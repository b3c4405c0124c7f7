"""A server that is told to end: who is in may finish for a while, and nobody else comes in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from omni_cluster.config.limits import Limits
from omni_cluster.config.loader import load_config
from omni_cluster.engine.deadline import Deadline
from omni_cluster.models.registry import known_families
from omni_cluster.types.errors import ServerClosing
from tests.configs import TINY_CONFIG
from tests.server.speaker import Face, face_of
from tests.server.streams import SPOKEN, begun

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
async def face(grace_s: float) -> AsyncIterator[Face]:
    """Three may be worked on; they have said a word, and say no more until they may."""
    config = load_config(TINY_CONFIG, known_families=known_families())
    limits = Limits(max_ongoing_requests=3, closing_grace_s=grace_s)
    async with face_of(config.model_copy(update={"limits": limits})) as face:
        face.speaker.may_speak.clear()
        yield face


async def asked(face: Face) -> list[asyncio.Task[httpx.Response]]:
    """Two streams and a whole answer, which are worked on, and one that waits for a place."""
    asks = (face.chat(stream=True, **SPOKEN), face.speech(stream_format="sse"), face.chat(**SPOKEN))
    running = [asyncio.create_task(each) for each in asks]
    await begun(face, 3)
    while face.speaker.heard < 3:
        await asyncio.sleep(0)
    waits = asyncio.create_task(face.chat())
    while not face.server.admission.slots.waiting:
        await asyncio.sleep(0)
    return [*running, waits]


def is_closing(error: dict[str, Any]) -> bool:
    return (error["error"]["code"], error["error"]["type"]) == ("server_closing", "service_unavailable_error")


async def assert_turned_away(face: Face) -> None:
    for answer in (await face.chat(), await face.speech(), await face.client.get("/v1/models")):
        assert answer.status_code == 503 and is_closing(answer.json()), answer.text
        assert (answer.headers["Retry-After"], answer.headers["Connection"]) == ("2", "close")
    ready, health = await face.client.get("/ready"), await face.client.get("/health")
    assert (ready.status_code, ready.json()["reason"], health.status_code) == (503, "The server is closing.", 200)


@pytest.mark.parametrize("grace_s", [60.0])
async def test_who_is_in_finishes_and_nobody_else_comes_in(face: Face) -> None:
    running = await asked(face)
    closes = asyncio.create_task(face.server.let_all_end())
    await asyncio.sleep(0)
    await assert_turned_away(face)
    assert not closes.done() and not any(task.done() for task in running)
    face.speaker.may_speak.set()
    answers = await asyncio.gather(*running)
    await closes
    assert [answer.status_code for answer in answers] == [200] * 4
    assert answers[0].text.endswith("data: [DONE]\n\n") and "speech.audio.done" in answers[1].text
    assert face.speaker.running == 0


@pytest.mark.parametrize("grace_s", [0.05])
async def test_who_does_not_finish_is_told_why_and_ends_everywhere(face: Face) -> None:
    running = await asked(face)
    await face.server.let_all_end()
    assert face.speaker.running == 0 and face.server.admission.slots.taken == 0
    *streams, whole, waited = await asyncio.gather(*running)
    for stream in streams:
        last = [line for line in stream.text.splitlines() if line.startswith("data: ")][-1]
        assert stream.status_code == 200 and is_closing(json.loads(last.removeprefix("data: "))), stream.text
    for answer in (whole, waited):
        assert answer.status_code == 503 and is_closing(answer.json()), answer.text
        assert answer.headers["Retry-After"] == "2"


async def test_a_deadline_that_comes_before_its_time_ends_who_waits_with_the_reason() -> None:
    deadline, inside = Deadline(60), asyncio.Event()

    async def waits() -> None:
        async with deadline.kept():
            inside.set()
            await asyncio.Event().wait()

    waiting = asyncio.create_task(waits())
    await inside.wait()
    deadline.come_now(ServerClosing("why"))
    with pytest.raises(ServerClosing, match="why"):
        await waiting
    assert deadline.left_s == 0
    with pytest.raises(ServerClosing, match="why"):  # and who comes later
        await waits()
