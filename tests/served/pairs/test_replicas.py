"""Two thinkers and two talkers: every consumer pulls from the replica that has its request."""

from __future__ import annotations

import asyncio
import base64
import http.server
import io
import socket
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from openai import AuthenticationError, OpenAI

from omni_cluster.cluster.transport import RemoteStage
from omni_cluster.types.errors import StageDied
from tests.codes import codes_of
from tests.http_app import assert_equals_reference, nothing_is_left
from tests.reference import KINDS, Reference, media, prompt_text
from tests.served.app import BASE_URL, KEY, PATIENCE_S, ServedApp, request_for, until, whole_scrape
from tests.served.beside import streams_beside
from tests.served.connections import Connections, read_all
from tests.served.leftovers import store_bytes
from tests.served.media_bodies import ANSWERED, SPOKEN, body_of, full_body, store_is_at_most
from tests.server.samples import totals

pytestmark = pytest.mark.cluster

AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
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


@pytest.mark.parametrize("header", [None, "Bearer another-key-of-nobody", f"Basic {KEY}"])
@pytest.mark.parametrize("path", ["/v1/models", "/ready", "/v1/chat/completions", "/nowhere", "//health"])
async def test_who_has_no_key_is_told_so_and_nothing_starts(
    served_2x2: ServedApp, path: str, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header}
    before = [status["requests"] for status in await served_2x2.statuses()]
    answer = served_2x2.client.post(path, json={}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert answer.headers["WWW-Authenticate"] == "Bearer" and answer.headers["x-request-id"]
    assert [status["requests"] for status in await served_2x2.statuses()] == before


def test_openai_s_sdk_without_the_key_says_so(served_2x2: ServedApp) -> None:
    with OpenAI(base_url=f"{BASE_URL}/v1", api_key="another-key-of-nobody", max_retries=0) as stranger:
        with pytest.raises(AuthenticationError) as refused:
            stranger.models.list()
        assert refused.value.code == "invalid_api_key"
    with OpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["preset:tiny"]


def test_health_is_open_and_a_page_may_ask_whether_it_may_ask(served_2x2: ServedApp) -> None:
    assert served_2x2.client.get("/health").status_code == 200
    headers = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    answer = served_2x2.client.options("/v1/chat/completions", headers=headers)
    assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (200, "https://app.example")


def test_an_image_by_url_is_the_same_image(served_2x2: ServedApp) -> None:
    (image,) = media("image")[1]
    file = io.BytesIO()
    image.save(file, "PNG")
    with hosted(file.getvalue()) as url:
        answers = [
            served_2x2.client.post(
                "/v1/chat/completions",
                json={
                    "model": "preset:tiny",
                    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": where}}]}],
                    "max_tokens": 12,
                    "temperature": 0,
                },
                headers=AUTHORIZED,
            )
            for where in (url, "data:image/png;base64," + base64.b64encode(file.getvalue()).decode())
        ]
    assert [answer.status_code for answer in answers] == [200, 200]
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[1] and texts[0]


@contextmanager
def hosted(data: bytes) -> Iterator[str]:
    """The URL of a file, as long as the context is open."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/a.png"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_an_address_reaches_that_replica_and_no_other(served_2x2: ServedApp) -> None:
    talker = RemoteStage(served_2x2.handle("talker"))
    ids = [s["replica_id"] for s in await served_2x2.statuses_of("talker")]
    assert len(set(ids)) == 2
    wanted = ids * 20
    reached = await asyncio.gather(*[talker.call("status", replica_id=i) for i in wanted])
    assert [s["replica_id"] for s in reached] == wanted


async def test_calls_without_an_address_go_to_both_replicas_in_turn(served_2x2: ServedApp) -> None:
    thinker: Any = served_2x2.handle("thinker")
    reached = await asyncio.gather(*[thinker.status.remote() for _ in range(40)])
    assert sorted(Counter(s["replica_id"] for s in reached).values()) == [20, 20]


async def test_an_address_that_is_gone_fails_at_once(served_2x2: ServedApp) -> None:
    talker = RemoteStage(served_2x2.handle("talker"))
    with pytest.raises(StageDied, match="ReplicaUnavailableError") as called:
        await talker.call("status", replica_id="nobody")
    with pytest.raises(StageDied, match="ReplicaUnavailableError") as streamed:
        async for _ in talker.stream("rows", "of-nobody", replica_id="nobody"):
            pass
    assert called.value.replica_id == streamed.value.replica_id == "nobody"  # no other request is sent there


async def test_both_replicas_of_a_stage_did_work(served_2x2: ServedApp) -> None:
    before = served_tokens(await served_2x2.statuses())
    await asyncio.gather(*[served_2x2.answer(request_for("text", f"work-{i}")) for i in range(8)])
    after = served_tokens(await served_2x2.statuses())
    worked = [replica for replica in after if after[replica] > before.get(replica, 0)]
    assert len(worked) >= 4  # of two thinkers, two talkers and a code2wav at least


async def test_later_turns_go_where_the_earlier_ones_were_computed(served_2x2: ServedApp) -> None:
    async def cached_tokens() -> float:
        return totals(await whole_scrape(AUTHORIZED))["stage_cached_tokens_total", "thinker"]

    await until(lambda: nothing_is_left(served_2x2), "earlier requests are gone")  # they make replicas busier
    before = await cached_tokens()
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=120, headers=AUTHORIZED) as client:
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


async def test_more_requests_than_may_wait_are_turned_away_before_the_first_byte(served_2x2: ServedApp) -> None:
    short = [{"max_tokens": n, "min_tokens": n} for n in (8, 48)]
    body = {
        "model": "preset:tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "wav"},
        "sampling_params_list": [*short, None],
        "stream": True,
    }
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=BASE_URL, headers=AUTHORIZED, timeout=600, limits=limits) as client:
        answers = await asyncio.gather(*[client.post("/v1/chat/completions", json=body) for _ in range(64)])
    taken = [a for a in answers if a.status_code == 200]
    refused = [a for a in answers if a.status_code == 429]
    assert len(taken) + len(refused) == len(answers)
    assert len(taken) >= 12 + 24 and refused  # both ingresses fill their places before either turns one away
    assert all(a.text.endswith("data: [DONE]\n\n") for a in taken)
    assert all(int(a.headers["Retry-After"]) > 0 for a in refused)
    assert {a.json()["error"]["type"] for a in refused} == {"rate_limit_error"}
    await until(lambda: nothing_is_left(served_2x2), "all replicas let go of the requests")


async def test_probes_get_in_while_others_are_turned_away(served_2x2: ServedApp) -> None:
    async with httpx.AsyncClient(base_url=BASE_URL, headers=AUTHORIZED, timeout=600) as client:
        limits = httpx.Limits(max_connections=60)
        async with httpx.AsyncClient(base_url=BASE_URL, headers=AUTHORIZED, timeout=600, limits=limits) as many:
            asked = [asyncio.create_task(many.post(CHAT, json=long_body())) for _ in range(60)]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            answers = [await client.get(path) for path in ("/health", "/ready") for _ in range(5)]
            assert sum(not task.done() for task in asked) >= 12, "the places were not taken"
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
    assert [answer.status_code for answer in answers] == [200] * 10
    await until(lambda: nothing_is_left(served_2x2), "all replicas let go of the requests")


def long_body() -> dict[str, Any]:
    """An answer of 40 s of sound, 2.6 MB as events."""
    exact = [{"max_tokens": n, "min_tokens": n} for n in (16, 2000)]
    return {
        "model": "preset:tiny",
        "messages": [{"role": "user", "content": "Tell a long story."}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "pcm16"},
        "sampling_params_list": [*exact, None],
        "stream": True,
    }


async def test_a_client_that_reads_nothing_is_ended_with_its_stages_beside_others(served_2x2: ServedApp) -> None:
    await until(lambda: nothing_is_left(served_2x2), "earlier requests are gone")
    before = totals(await whole_scrape(AUTHORIZED))

    async def leaves_it_unread(client: httpx.AsyncClient) -> None:
        with Connections() as connections:
            name = f"unread-{uuid.uuid4().hex[:8]}"
            connections.ask(CHAT, long_body(), **AUTHORIZED, **{"x-request-id": name})
            await until(lambda: is_ended(name), "what is unread is above its limit", 5 * PATIENCE_S)

    async with httpx.AsyncClient(base_url=BASE_URL, headers=AUTHORIZED, timeout=5 * PATIENCE_S) as client:
        await streams_beside(leaves_it_unread, client)
    await until(lambda: nothing_is_left(served_2x2), "all replicas let go of the request")
    after = totals(await whole_scrape(AUTHORIZED))
    cancelled = ("stage_requests_total", "cancelled", "code2wav")
    assert after[cancelled] > before[cancelled], "code2wav made all of it"


async def is_ended(name: str) -> bool:
    logs = Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"
    said = "".join(file.read_text() for file in logs.glob("proxy_*.log"))
    return f"request {name}: ended, its client left" in said


DEADLINE = {"x-request-timeout-seconds": "2"}


async def test_a_fetch_ends_at_the_request_s_own_deadline(served_2x2: ServedApp) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        image = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{silent.getsockname()[1]}/a.png"}}
        body = {"model": "preset:tiny", "messages": [{"role": "user", "content": [image]}]}
        answer = await asyncio.to_thread(served_2x2.client.post, CHAT, json=body, headers=AUTHORIZED | DEADLINE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert await nothing_is_left(served_2x2)


async def test_a_wait_for_a_place_ends_at_the_request_s_own_deadline(served_2x2: ServedApp) -> None:
    async with httpx.AsyncClient(base_url=BASE_URL, headers=AUTHORIZED, timeout=600) as client:
        asked = [asyncio.create_task(client.post(CHAT, json=long_body())) for _ in range(24)]

        async def all_places_are_taken() -> bool:
            return totals(await whole_scrape(AUTHORIZED))["ingress_places", "taken"] == 12

        try:
            await until(all_places_are_taken, "all places are taken")
            answer = await client.post(CHAT, json=long_body(), headers=DEADLINE)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    await until(lambda: nothing_is_left(served_2x2), "all replicas let go of the requests")


LARGEST: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: ANSWERED[name] for name in ("the largest picture", "the largest file of sound", "the longest video")},
    "a body of 64 MiB": lambda: full_body(**SPOKEN),
}


@pytest.mark.parametrize("name", LARGEST)
async def test_the_largest_media_are_answered_in_sound(served_2x2: ServedApp, name: str) -> None:
    before = store_bytes()
    body = LARGEST[name]() | SPOKEN
    answer = await asyncio.to_thread(served_2x2.client.post, CHAT, json=body, headers=AUTHORIZED, timeout=600)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["audio"]["data"]
    await until(lambda: nothing_is_left(served_2x2), "all replicas let go of the request")
    await until(lambda: store_is_at_most(before), "no object of the request is left in the store")


async def test_the_longest_prompt_is_answered_in_sound(served_2x2: ServedApp) -> None:
    def asked(num_words: int) -> dict[str, Any]:
        return body_of({"type": "text", "text": "word " * num_words}) | SPOKEN

    async def ask(num_words: int) -> httpx.Response:
        return await asyncio.to_thread(served_2x2.client.post, CHAT, json=asked(num_words), headers=AUTHORIZED)

    few, more = [(await ask(n)).json()["usage"]["prompt_tokens"] for n in (10, 20)]
    num_words = 10 + (MAX_TOKENS - few) * 10 // (more - few)
    answer, refused = await ask(num_words), await ask(num_words + 1)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["audio"]["data"]
    assert MAX_TOKENS - 1 <= answer.json()["usage"]["prompt_tokens"] <= MAX_TOKENS
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert f"maximum context length is {MAX_TOKENS} tokens" in refused.json()["error"]["message"]
    await until(lambda: nothing_is_left(served_2x2), "all replicas let go of the requests")


async def test_a_body_that_comes_too_slowly_is_408_and_its_connection_ends(served_2x2: ServedApp) -> None:
    await until(lambda: nothing_is_left(served_2x2), "earlier requests are gone")
    with Connections() as connections:
        slow = connections.ask(CHAT, long_body(), missing_bytes=1, **AUTHORIZED)
        answer = await asyncio.to_thread(read_all, slow)
    assert answer.startswith(b"HTTP/1.1 408 ") and b"took more than 3 s" in answer
    assert await nothing_is_left(served_2x2)
