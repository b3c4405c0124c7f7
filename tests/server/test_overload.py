"""Who asks for more than may be: a key beyond its minute, and all of them beyond the places. Nothing of it begins."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from omni_cluster.config.limits import Limits
from omni_cluster.config.loader import load_config
from omni_cluster.models.registry import known_families
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.server.slots import AdmissionSlots
from omni_cluster.types.errors import ConfigError
from tests.server.keyed import ONE, OTHER, config_of
from tests.server.speaker import CHAT, face_of
from tests.server.streams import SPOKEN, begun

pytestmark = pytest.mark.usefixtures("tiny")


def refused(answer: httpx.Response, words: str) -> int:
    """Seconds after which it may be sent again."""
    error = answer.json()["error"]
    assert answer.status_code == 429 and words in error["message"], answer.text
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    return int(answer.headers["Retry-After"])


async def test_a_key_gets_its_requests_a_minute_and_others_theirs(tmp_path: Path) -> None:
    async with face_of(config_of(tmp_path, requests_per_minute=3.0)) as face:
        assert [(await face.chat(ONE)).status_code for _ in range(3)] == [200] * 3
        assert refused(await face.chat(ONE), "may send 3 requests a minute") == 20
        assert refused(await face.speech(ONE), "in 20 s") == 20
        assert len(face.speaker.begun) == 3
        assert (await face.chat(OTHER)).status_code == 200
        assert (await face.client.get("/v1/models", headers={"Authorization": f"Bearer {ONE}"})).status_code == 200
        face.now_s += 19
        assert refused(await face.chat(ONE), "in 1 s") == 1
        face.now_s += 1
        assert (await face.chat(ONE)).status_code == 200
        face.now_s += 3600  # no more than a minute's are saved
        assert [(await face.chat(ONE)).status_code for _ in range(4)] == [200] * 3 + [429]


async def test_a_request_that_finds_no_place_is_not_counted(tmp_path: Path) -> None:
    limits = Limits(max_ongoing_requests=1, max_queued_requests=0)
    async with face_of(config_of(tmp_path, limits, requests_per_minute=2.0)) as face:
        face.speaker.may_speak.clear()
        first = asyncio.create_task(face.chat(ONE))
        await begun(face, 1)
        for _ in range(5):
            answer = await face.chat(ONE)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_requests")
        face.speaker.may_speak.set()
        assert (await first).status_code == 200
        assert [(await face.chat(ONE)).status_code for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_that_had_its_sound_waits_until_that_came_back(tmp_path: Path, stream: bool) -> None:
    async with face_of(config_of(tmp_path, sound_seconds_per_minute=1.5)) as face:
        for _ in range(2):  # each a second; the second may begin, and overdraws
            assert (await face.chat(ONE, stream=stream, **SPOKEN)).status_code == 200
        assert refused(await face.chat(ONE, stream=stream, **SPOKEN), "1.5 seconds of sound a minute") == 20
        assert refused(await face.speech(ONE), "in 20 s") == 20
        assert len(face.speaker.begun) == 2
        assert (await face.chat(ONE, stream=stream)).status_code == 200  # text has no sound
        assert (await face.speech(OTHER, stream_format="audio" if stream else None)).status_code == 200
        face.now_s += 20
        assert (await face.chat(ONE, stream=stream, **SPOKEN)).status_code == 200


@pytest.mark.parametrize(("ingresses", "each"), [(2, 3), (3, 2), (9, 1)])
async def test_ingresses_share_what_a_key_may_send(tmp_path: Path, ingresses: int, each: int) -> None:
    async with face_of(config_of(tmp_path, requests_per_minute=6.0), ingresses) as face:
        assert [(await face.chat(ONE)).status_code for _ in range(each + 1)] == [200] * each + [429]


async def test_wrong_keys_to_paths_that_need_none_leave_nothing_behind(tmp_path: Path) -> None:
    async with face_of(config_of(tmp_path, requests_per_minute=3.0)) as face:
        for number in range(20):
            for path in ("/", "/playground/main.js"):
                headers = {"Authorization": f"Bearer a-wrong-key-{number:04}"}
                assert (await face.client.get(path, headers=headers)).status_code == 200
        assert (await face.chat(ONE)).status_code == (await face.chat(OTHER)).status_code == 200
        assert len(face.server.admission._quotas._by_key) == 3  # of the two keys, and of all that send none


async def test_without_a_rate_nothing_is_counted(tmp_path: Path) -> None:
    async with face_of(config_of(tmp_path)) as face:
        answers = [await face.chat(**SPOKEN) for _ in range(30)]
    assert {answer.status_code for answer in answers} == {200}


@pytest.mark.parametrize("rate", ["requests_per_minute", "sound_seconds_per_minute"])
def test_a_rate_without_keys_is_refused(tmp_path: Path, rate: str) -> None:
    path = tmp_path / "config.yaml"
    shipped = Path(__file__).parents[2] / "stage_configs" / "qwen2_5_omni_tiny.yaml"
    path.write_text(f"{shipped.read_text()}\napi:\n  {rate}: 5\n")
    with pytest.raises(ConfigError, match=rf"api\.{rate} is 5.0.*keys_file or keys_variable"):
        load_config(path, known_families=known_families())


async def test_ten_times_as_many_as_may_be_are_told_when_to_come_again_and_start_nothing(tmp_path: Path) -> None:
    limits = Limits(max_ongoing_requests=4, max_queued_requests=4)
    async with face_of(config_of(tmp_path, limits)) as face:
        face.speaker.may_speak.clear()
        asked = [asyncio.create_task(face.chat(stream=True, **SPOKEN)) for _ in range(80)]
        turned_away = 0
        async with asyncio.timeout(60):
            for answered in asyncio.as_completed(asked):
                answer = await answered
                assert answer.status_code == 429 and int(answer.headers["Retry-After"]) >= 1
                turned_away += 1
                if turned_away == 72:  # all of them, while those that were taken have not got further
                    break
        await begun(face, 4)
        assert len(face.speaker.begun) == face.speaker.running == 4
        face.speaker.may_speak.set()
        answers = [await task for task in asked]
        taken = [answer for answer in answers if answer.status_code == 200]
        assert len(taken) == 8 and all(answer.text.endswith("data: [DONE]\n\n") for answer in taken)


async def test_who_cannot_be_served_is_told_so_before_the_body_comes(tmp_path: Path) -> None:
    limits = Limits(max_ongoing_requests=1, max_queued_requests=0)
    async with face_of(config_of(tmp_path, limits)) as face:
        face.speaker.may_speak.clear()
        first = asyncio.create_task(face.chat())
        await begun(face, 1)
        app, sent = face.server.app(), list[Any]()

        async def never() -> Any:
            raise AssertionError("its body was asked for")

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"content-length", b"60000000")]
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "query_string": b""}
        await app(scope, never, send)
        assert sent[0]["status"] == 429
        face.speaker.may_speak.set()
        assert (await first).status_code == 200


async def test_a_request_that_would_wait_too_long_for_its_slot_is_refused() -> None:
    now_s = [0.0]
    slots = AdmissionSlots(2, 100, max_wait_s=40.0, clock=lambda: now_s[0])
    waiting = [asyncio.create_task(slots.take()) for _ in range(10)]  # how long they wait is not known yet
    await asyncio.sleep(0)
    for _ in range(4):
        now_s[0] += 10
        slots.give_back()
    with pytest.raises(BadRequest, match=r"would wait 50 s, longer than max_wait_s = 40; send") as refused:
        await slots.take()
    assert (refused.value.status, refused.value.retry_after_s) == (429, pytest.approx(50))
    waiting.pop().cancel()
    await asyncio.sleep(0)
    slots.check_room()  # 40 s
    for task in waiting:
        task.cancel()


async def test_a_request_that_has_waited_too_long_for_its_slot_is_refused_and_leaves_its_place() -> None:
    slots = AdmissionSlots(1, 1, max_wait_s=0.05)
    await slots.take()
    for _ in range(2):
        with pytest.raises(BadRequest, match=r"1 requests run, and none .* within max_wait_s = 0.05; send") as refused:
            await slots.take()
        assert refused.value.status == 429 and (slots.taken, slots.waiting) == (1, 0)
    slots.give_back()
    await slots.take()
    assert (slots.taken, slots.waiting) == (1, 0)


async def test_when_to_come_again_is_how_long_those_that_wait_will_take() -> None:
    now_s = [0.0]
    slots = AdmissionSlots(2, 3, clock=lambda: now_s[0])
    waiting = [asyncio.create_task(slots.take()) for _ in range(5)]
    await asyncio.sleep(0)

    def comes_again_s() -> float | None:
        with pytest.raises(BadRequest, match="2 requests run and 3 wait") as refused:
            slots.check_room()
        return refused.value.retry_after_s

    assert comes_again_s() is None  # nothing is known yet
    for _ in range(40):
        now_s[0] += 3.0
        slots.give_back()
        waiting.append(asyncio.create_task(slots.take()))
        await asyncio.sleep(0)
    assert slots.waiting == 3 and comes_again_s() == pytest.approx(12.0)
    for _ in range(200):
        now_s[0] += 0.5
        slots.give_back()
        waiting.append(asyncio.create_task(slots.take()))
        await asyncio.sleep(0)
    assert comes_again_s() == pytest.approx(2.0)
    while slots.taken:
        now_s[0] += 0.5
        slots.give_back()
        await asyncio.sleep(0)
    now_s[0] += 3600  # nobody waited meanwhile, so it says nothing of how long places take
    for _ in range(5):
        await slots.take() if slots.taken < 2 else waiting.append(asyncio.create_task(slots.take()))
        await asyncio.sleep(0)
    slots.give_back()
    waiting.append(asyncio.create_task(slots.take()))
    await asyncio.sleep(0)
    assert comes_again_s() == pytest.approx(2.0)
