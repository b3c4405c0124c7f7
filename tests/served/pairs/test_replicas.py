"""Two thinkers and two talkers: every consumer pulls from the replica that has its request."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.codes import codes_of
from tests.http_app import assert_equals_reference, nothing_is_left
from tests.reference import KINDS, Reference, media, prompt_text
from tests.served.app import BASE_URL, PATIENCE_S, ServedApp, request_for, until, whole_scrape
from tests.served.leftovers import store_bytes
from tests.served.media_bodies import ANSWERED, SPOKEN, body_of, full_body, store_is_at_most
from tests.server.samples import totals

pytestmark = pytest.mark.full

CHAT = "/v1/chat/completions"
CONVERSATIONS, TURNS = 4, 3
MAX_TOKENS = 1536
"""Of a prompt, by the shipped configuration."""
QUESTIONS = ("What is it?", "Describe the picture and the sound, please.")


async def test_eight_requests_at_once_equal_their_references(served_2x2: ServedApp, reference: Reference) -> None:
    asked = [(kind, question) for kind in KINDS for question in QUESTIONS]
    expected = [
        reference.speech(prompt_text(kind, question), *media(kind), voice=voice_of(i), seed=i)
        for i, (kind, question) in enumerate(asked)
    ]
    for attempt in range(3):
        outputs = await asyncio.gather(
            *[
                served_2x2.answer(
                    request_for(kind, f"eight-{attempt}-{i}", question=question, voice=voice_of(i), seed=i)
                )
                for i, (kind, question) in enumerate(asked)
            ]
        )
        for output, of_reference in zip(outputs, expected, strict=True):
            assert_equals_reference(output, of_reference)
    assert len({tuple(codes_of(o)) for o in outputs}) == len(asked)
    await until(lambda: nothing_is_left(served_2x2), "all replicas let go of the requests")


def voice_of(i: int) -> str:
    return ("Chelsie", "Ethan")[i % 2]


async def test_later_turns_go_where_the_earlier_ones_were_computed(served_2x2: ServedApp) -> None:
    async def cached_tokens() -> float:
        return totals(await whole_scrape())["stage_cached_tokens_total", "thinker"]

    await until(lambda: nothing_is_left(served_2x2), "earlier requests are gone")  # they make replicas busier
    before = await cached_tokens()
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=120) as client:
        for number in range(CONVERSATIONS):
            turns = [{"role": "user", "content": f"{number}: " + "Tell me all about it. " * 12}]
            for _ in range(TURNS):
                answer = await client.post(CHAT, json=spoken(turns))
                said = answer.json()["choices"][0]["message"]["content"]
                turns += [{"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    # Each later turn reads a block of 128, the size on a CPU: whichever of the two ingresses it comes to.
    assert await cached_tokens() - before == CONVERSATIONS * (TURNS - 1) * 128


async def test_a_talker_that_lacks_an_earlier_prompt_asks_for_its_rows_once(
    served_2x2: ServedApp, reference: Reference
) -> None:
    """One thinker answers a conversation, either talker speaks: the second one lacks what the first one has."""

    async def asked_bytes() -> int:
        return sum(status["rows_sent_bytes"]["asked"] for status in await served_2x2.statuses_of("thinker"))

    async def spoke() -> dict[str, int]:
        return served_tokens(await served_2x2.statuses_of("talker"))

    await until(lambda: nothing_is_left(served_2x2), "earlier requests are gone")
    question = "Tell me all about it. " * 60
    expected = reference.speech(prompt_text("text", question))
    before, asked = await spoke(), await asked_bytes()
    talkers, who_asked = list[str](), list[str]()
    while len(talkers) < 4 or len(set(talkers)) < 2:
        assert len(talkers) < 40, "all requests went to one talker"
        request = request_for("text", f"begins-alike-{len(talkers)}", question=question)
        assert_equals_reference(await served_2x2.answer(replace(request, conversation=b"a talk")), expected)
        await until(lambda: nothing_is_left(served_2x2), "the request is gone")
        after, asked_now = await spoke(), await asked_bytes()
        talkers += [replica for replica in after if after[replica] > before[replica]]
        who_asked += talkers[-1:] if asked_now > asked else []
        before, asked = after, asked_now
    assert who_asked == [next(each for each in talkers if each != talkers[0])]


def spoken(messages: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "model": "preset:tiny",
        "messages": messages,
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "pcm16"},
        "sampling_params_list": [{"max_tokens": 4}, {"max_tokens": 12}, None],
    }


def served_tokens(statuses: list[dict[str, Any]]) -> dict[str, int]:
    return {s["replica_id"]: s["requests"] for s in statuses}


async def test_a_stage_with_more_requests_than_its_signal_allows_gets_a_replica(served_2x2: ServedApp) -> None:
    async def wanted_after_a_burst() -> bool:
        await asyncio.gather(*[served_2x2.answer(request_for("text", f"scale-{uuid.uuid4()}")) for _ in range(12)])
        return served_2x2.replicas("code2wav") == 2

    async def running() -> bool:
        return len(await served_2x2.statuses_of("code2wav")) == 2

    await until(wanted_after_a_burst, "a second replica was started", 2 * PATIENCE_S)
    await until(running, "the second replica runs", 2 * PATIENCE_S)
    assert served_2x2.replicas("thinker") == 2  # what has no autoscaling stays as it is


LARGEST: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: ANSWERED[name] for name in ("the largest picture", "the largest file of sound", "the longest video")},
    "a body of 64 MiB": lambda: full_body(**SPOKEN),
}


@pytest.mark.parametrize("name", LARGEST)
async def test_the_largest_media_are_answered_in_sound(served_2x2: ServedApp, name: str) -> None:
    before = store_bytes()
    body = LARGEST[name]() | SPOKEN
    answer = await asyncio.to_thread(served_2x2.client.post, CHAT, json=body, timeout=600)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["audio"]["data"]
    await until(lambda: nothing_is_left(served_2x2), "all replicas let go of the request")
    await until(lambda: store_is_at_most(before), "no object of the request is left in the store")


async def test_the_longest_prompt_is_answered_in_sound(served_2x2: ServedApp) -> None:
    def asked(num_words: int) -> dict[str, Any]:
        return body_of({"type": "text", "text": "word " * num_words}) | SPOKEN

    async def ask(num_words: int) -> httpx.Response:
        return await asyncio.to_thread(served_2x2.client.post, CHAT, json=asked(num_words))

    few, more = [(await ask(n)).json()["usage"]["prompt_tokens"] for n in (10, 20)]
    num_words = 10 + (MAX_TOKENS - few) * 10 // (more - few)
    answer, refused = await ask(num_words), await ask(num_words + 1)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["audio"]["data"]
    assert MAX_TOKENS - 1 <= answer.json()["usage"]["prompt_tokens"] <= MAX_TOKENS
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert f"maximum context length is {MAX_TOKENS} tokens" in refused.json()["error"]["message"]
    await until(lambda: nothing_is_left(served_2x2), "all replicas let go of the requests")
