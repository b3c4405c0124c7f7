"""Through HTTP at the documented limits of prompts and sound, which the tiny default's own length does not reach."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.http_app import nothing_is_left
from tests.served.app import BASE_URL, KEY, ServedApp, long_checkpoint, until
from tests.served.leftovers import store_bytes
from tests.served.media_bodies import CHAT, SPOKEN, body_of, film, sound, store_is_at_most

pytestmark = pytest.mark.full

PATIENCE_S = 500
MAX_TOKENS = 28_000
TOKENS_A_SECOND = 25


def ask(watched: ServedApp, *parts: dict[str, Any], **options: Any) -> httpx.Response:
    body = body_of(*parts, **options) | {"model": str(long_checkpoint())}
    headers = {"Authorization": f"Bearer {KEY}"}
    return watched.client.post("/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_S)


def text(num_words: int) -> dict[str, Any]:
    return {"type": "text", "text": "word " * num_words}


def words_that_fit(watched: ServedApp) -> int:
    """How many make a prompt of the most tokens: each is as many as the last."""
    few, more = (ask(watched, text(n), max_tokens=1).json()["usage"]["prompt_tokens"] for n in (10, 20))
    return 10 + (MAX_TOKENS - few) * 10 // (more - few)


@pytest.mark.parametrize("spoken", [False, True])
async def test_the_longest_prompt_is_answered_and_a_longer_one_is_refused(watched: ServedApp, spoken: bool) -> None:
    num_words, before = words_that_fit(watched), store_bytes()
    talk = SPOKEN if spoken else {}
    answer = ask(watched, text(num_words), **talk)
    assert answer.status_code == 200, answer.text
    assert MAX_TOKENS - 1 <= answer.json()["usage"]["prompt_tokens"] <= MAX_TOKENS
    assert not spoken or answer.json()["choices"][0]["message"]["audio"]["data"]
    refused = ask(watched, text(num_words + 1), **talk)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert f"length is {MAX_TOKENS} tokens" in refused.json()["error"]["message"]
    await until(lambda: nothing_is_left(watched), "all stages let go of the requests")
    await until(lambda: store_is_at_most(before), "no object of the requests is left in the store")


async def test_clients_that_leave_within_a_long_prompt_leave_nothing_and_disturb_nobody(watched: ServedApp) -> None:
    """The talker follows the thinker, on another raylet, through the prompt's chunks; some leave in the midst."""
    await until(lambda: nothing_is_left(watched), "earlier requests are gone")
    before = store_bytes()
    stays = asyncio.create_task(asyncio.to_thread(ask, watched, text(4000), **SPOKEN))
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=PATIENCE_S) as client:
        # They speak for so long that none can end before the test has seen that both began.
        endless = SPOKEN | {"stage_sampling_params": {"talker": {"max_tokens": 2048, "min_tokens": 2048}}}
        body = body_of(text(3000), **endless) | {"model": str(long_checkpoint())}
        headers = {"Authorization": f"Bearer {KEY}"}
        leaving = [asyncio.create_task(client.post(CHAT, json=body, headers=headers)) for _ in range(2)]

        async def talker_follows() -> bool:
            ended = [task.result().text[:300] for task in leaving if task.done()]
            assert not ended, ended
            return any(s["engine"]["running"] >= 2 for s in await watched.statuses_of("talker"))

        await until(talker_follows, "the talker began")
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
    answer = await stays
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["audio"]["data"], answer.text[:300]
    await until(lambda: nothing_is_left(watched), "all stages let go of the requests")
    await until(lambda: store_is_at_most(before), "no object of the requests is left in the store")


async def test_ten_minutes_of_sound_are_heard_to_their_end(watched: ServedApp) -> None:
    before = store_bytes()
    answer = ask(watched, sound(600 * 16_000))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] >= 600 * TOKENS_A_SECOND
    refused = ask(watched, sound(600 * 16_000 + 16))
    assert refused.status_code == 413 and "600" in refused.json()["error"]["message"]
    await until(lambda: nothing_is_left(watched), "all stages let go of the request")
    await until(lambda: store_is_at_most(before), "no object of the request is left in the store")


async def test_the_most_frames_of_a_video_are_seen(watched: ServedApp) -> None:
    before = store_bytes()
    few, most = (ask(watched, film(frames=frames, rate=4) | {"fps": 2}) for frames in (128, 256))
    assert (few.status_code, most.status_code) == (200, 200), (few.text, most.text)
    assert most.json()["usage"]["prompt_tokens"] > few.json()["usage"]["prompt_tokens"] + 64
    await until(lambda: nothing_is_left(watched), "all stages let go of the requests")
    await until(lambda: store_is_at_most(before), "no object of the requests is left in the store")
