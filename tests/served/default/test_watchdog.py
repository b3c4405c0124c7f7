"""What is stopped or killed beside a served application: its requests go on, it is replaced, and no process stays."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import time
import uuid
from typing import Any

import httpx
import numpy as np
import pytest

from tests.http_app import PCM16_STEP, STREAM_TOLERANCE, assert_equals_reference, nothing_is_left
from tests.processes import engine_of, family, running_after
from tests.reference import Reference, prompt_text
from tests.served.app import BASE_URL, ServedApp, request_for, until
from tests.served.replaced import CHAT, NOTICED_S, REPLACED_S, all_are_replaced, body, process_ids

pytestmark = pytest.mark.full


async def heard_though_stopped(pid: int) -> tuple[str, np.ndarray]:
    """Text and sound of a long answer. Once there is sound, the process is stopped: the rest is another replica's."""
    stopped_s, lines = 0.0, []
    asks = body(16, 2048, stream=True, seed=7, audio={"voice": "Ethan", "format": "pcm16"})
    client = httpx.AsyncClient(base_url=BASE_URL, timeout=REPLACED_S)
    async with client, client.stream("POST", CHAT, json=asks) as response:
        async for line in response.aiter_lines():
            lines += [line.removeprefix("data: ")] if line.startswith("data: ") else []
            if '"audio"' in line and not stopped_s:
                stopped_s = time.monotonic()
                os.kill(pid, signal.SIGSTOP)
    assert stopped_s and lines[-1] == "[DONE]", lines[-2:]
    said = next(json.loads(line)["omni"] for line in reversed(lines) if '"omni"' in line)
    assert said["stages"]["talker"]["tokens"] == 2048
    deltas = [choice["delta"] for line in lines[:-1] for choice in json.loads(line).get("choices", ())]
    pieces = [base64.b64decode((delta.get("audio") or {}).get("data") or "") for delta in deltas]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return text, np.frombuffer(b"".join(pieces), np.int16) * PCM16_STEP


async def assert_answers_exactly(served: ServedApp, reference: Reference) -> None:
    expected = reference.speech(prompt_text("text", "Hello world, describe it."), voice="Chelsie", seed=0)
    answers: list[Any] = []

    async def answered() -> bool:
        with contextlib.suppress(Exception):  # as long as the ingress still knows a replica that is gone
            answers.append(await served.answer(request_for("text", uuid.uuid4().hex)))
        return bool(answers)

    await until(answered, "the stages answer", REPLACED_S)
    assert_equals_reference(answers[0], expected)
    await until(lambda: nothing_is_left(served), "all stages let go of the request")


@pytest.mark.timeout(1200)
async def test_requests_survive_the_only_replica_of_a_stage_and_it_is_replaced(
    served: ServedApp, reference: Reference
) -> None:
    await assert_answers_exactly(served, reference)
    pids = await process_ids(served)

    # An engine is stopped in the midst of a stream.
    talker = family(pids["talker"])
    text, sound = await heard_though_stopped(engine_of(pids["talker"]))
    assert not running_after(talker, NOTICED_S), "a process of the talker stayed"

    # A replica is killed: what it started goes with it, and who asks meanwhile waits.
    thinker = family(pids["thinker"])
    os.kill(pids["thinker"], signal.SIGKILL)
    assert not running_after(thinker, NOTICED_S), "a process of the thinker stayed"
    new = await all_are_replaced(served, {name: pids[name] for name in ("thinker", "talker")})
    await assert_answers_exactly(served, reference)

    # A whole replica is stopped in the midst of a stream: the same answer, though it was lost elsewhere.
    code2wav = family(new["code2wav"])
    same_text, same_sound = await heard_though_stopped(new["code2wav"])
    assert same_text == text and len(same_sound) == len(sound) > 0
    np.testing.assert_allclose(same_sound, sound, atol=2 * STREAM_TOLERANCE + PCM16_STEP)
    assert not running_after(code2wav, NOTICED_S), "a process of code2wav stayed"
    newest = await all_are_replaced(served, {"code2wav": new["code2wav"]})
    assert {name: newest[name] for name in ("thinker", "talker")} == {name: new[name] for name in ("thinker", "talker")}
    await assert_answers_exactly(served, reference)


async def test_many_long_prompts_at_once_do_not_have_a_stage_replaced(served: ServedApp) -> None:
    before = await process_ids(served)
    long = [{"role": "user", "content": "A long story. " * 100}]
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=300) as client:
        answers = await asyncio.gather(
            *(client.post(CHAT, json=body(16, 64, messages=long)) for _ in range(24)),
        )
    assert [answer.status_code for answer in answers] == [200] * 24
    assert await process_ids(served) == before
    await until(lambda: nothing_is_left(served), "all stages let go of the requests")
