"""What one client sends, beside others that only stream: these get every word, in time, and refusals cost no engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.http_app import nothing_is_left
from tests.served.app import BASE_URL, ServedApp, until, work
from tests.served.beside import Harm, streams_beside
from tests.served.connections import Connections, read_all
from tests.served.decoder_bodies import BOMBS, asking
from tests.served.door_bodies import DEADLINE, body
from tests.served.media_bodies import body_of, picture, sound
from tests.server.bad_inputs import CHAT, JSON, STAGES, chat
from tests.server.neighbours import LONG

pytestmark = pytest.mark.full

PATIENCE_S = 300
SLOW = 20
TEXTS = 8
PIECES = 20_000
"""More than any stack has room for, were each to take some."""


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=PATIENCE_S) as client:
        yield client


async def sampling_that_cannot_be(client: httpx.AsyncClient) -> None:
    spoken = {"modalities": ["text", "audio"]}
    for bad in STAGES:
        answer = await client.post(CHAT, json=bad.body | spoken)
        assert (answer.status_code, answer.json()["error"]["code"]) == (bad.status, bad.code), bad.name


async def bombs(client: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(*(client.post(CHAT, json=asking(*parts)) for parts, _, _ in BOMBS.values()))
    for answer, (_, status, code) in zip(answers, BOMBS.values(), strict=True):
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def texts_that_are_long(client: httpx.AsyncClient) -> None:
    """As long as they may be, half of them with a mark: the ingress counts all of their tokens."""
    texts = [chat(messages=[{"role": "user", "content": mark + "word " * 200_000}]) for mark in ("", "<|im_end|>")]
    for answer in await asyncio.gather(*(client.post(CHAT, json=texts[n % 2]) for n in range(TEXTS))):
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def bodies_that_do_not_come(client: httpx.AsyncClient) -> None:
    with Connections() as connections:
        slow = [connections.ask(CHAT, body(), missing_bytes=5, **DEADLINE) for _ in range(SLOW)]
        answers = await asyncio.gather(*(asyncio.to_thread(read_all, each) for each in slow))
    assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers)


async def a_seeded_long_prompt(client: httpx.AsyncClient) -> None:
    asked = chat(messages=[{"role": "user", "content": LONG}], temperature=1.0, seed=1, max_tokens=24)
    answers = [(await client.post(CHAT, json=asked)).json() for _ in range(2)]
    assert answers[0]["usage"]["prompt_tokens"] > 512
    assert answers[0]["choices"][0]["message"] == answers[1]["choices"][0]["message"]


async def a_phone_s_media(client: httpx.AsyncClient) -> None:
    for parts in ([picture(4000, 3000, "JPEG")], [sound(60 * 16_000)]):
        answer = await client.post(CHAT, json=body_of(*parts))
        assert answer.status_code == 200, answer.text


async def a_body_of_single_bytes(client: httpx.AsyncClient) -> None:
    sent = json.dumps(chat(max_tokens=2)).encode() + b" " * PIECES
    lines = (f"POST {CHAT} HTTP/1.1", "Host: here", f"Content-Type: {JSON}", "Transfer-Encoding: chunked")
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in sent) + b"0\r\n\r\n"
    with Connections() as connections:
        connection = connections.open()
        await asyncio.to_thread(connection.sendall, "\r\n".join([*lines, "", ""]).encode() + chunks)
        assert (await asyncio.to_thread(connection.recv, 12)) == b"HTTP/1.1 200"


REFUSED: dict[str, Harm] = {
    each.__name__: each for each in (sampling_that_cannot_be, texts_that_are_long, bombs, bodies_that_do_not_come)
}
TAKEN: dict[str, Harm] = {each.__name__: each for each in (a_seeded_long_prompt, a_phone_s_media)}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused_costs_others_and_engines_nothing(
    served: ServedApp, client: httpx.AsyncClient, name: str
) -> None:
    await until(lambda: nothing_is_left(served), "earlier requests are gone")
    before = await work(served)
    streams = await streams_beside(REFUSED[name], client)
    await until(lambda: nothing_is_left(served), "the streams are gone")
    thinker, *others = await work(served)
    assert thinker[0] == before[0][0] + streams and others == before[1:]


@pytest.mark.parametrize("name", TAKEN)
async def test_what_is_large_or_long_changes_no_other_stream(
    served: ServedApp, client: httpx.AsyncClient, name: str
) -> None:
    await streams_beside(TAKEN[name], client)
    await until(lambda: nothing_is_left(served), "all stages let go of the requests")


async def test_a_body_of_single_bytes_is_a_body_as_any_other(served: ServedApp, client: httpx.AsyncClient) -> None:
    await streams_beside(a_body_of_single_bytes, client)
