"""What two ingresses over nodes refuse, and what they bound: keys, places, deadlines, slow and silent clients."""

from __future__ import annotations

import asyncio
import base64
import http.server
import io
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from openai import AuthenticationError, OpenAI
from PIL import Image

from tests.http_app import nothing_is_left
from tests.served.app import AUTHORIZED, BASE_URL, KEY, PATIENCE_S, ServedApp, until, whole_scrape
from tests.served.beside import streams_beside
from tests.served.connections import Connections, read_all
from tests.server.samples import totals

pytestmark = pytest.mark.cluster

CHAT = "/v1/chat/completions"
DEADLINE = {"x-request-timeout-seconds": "5"}
"""Ours ends half a second before Serve's own."""


@pytest.mark.parametrize("header", [None, "Bearer another-key-of-nobody", f"Basic {KEY}"])
@pytest.mark.parametrize("path", ["/v1/models", "/ready", "/v1/chat/completions", "/nowhere", "//health"])
async def test_who_has_no_key_is_told_so_and_nothing_starts(
    toy_nodes: ServedApp, path: str, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header}
    before = [status["requests"] for status in await toy_nodes.statuses()]
    answer = httpx.post(f"{BASE_URL}{path}", json={}, headers=headers, timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert answer.headers["WWW-Authenticate"] == "Bearer" and answer.headers["x-request-id"]
    assert [status["requests"] for status in await toy_nodes.statuses()] == before


def test_openai_s_sdk_without_the_key_says_so(toy_nodes: ServedApp) -> None:
    with OpenAI(base_url=f"{BASE_URL}/v1", api_key="another-key-of-nobody", max_retries=0) as stranger:
        with pytest.raises(AuthenticationError) as refused:
            stranger.models.list()
        assert refused.value.code == "invalid_api_key"
    with OpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["preset:tiny"]


def test_health_is_open_and_a_page_may_ask_whether_it_may_ask(toy_nodes: ServedApp) -> None:
    assert httpx.get(f"{BASE_URL}/health", timeout=PATIENCE_S).status_code == 200
    headers = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(BASE_URL + CHAT, headers=headers, timeout=PATIENCE_S)
    assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (200, "https://app.example")


def test_an_image_by_url_is_the_same_image(toy_nodes: ServedApp) -> None:
    file = io.BytesIO()
    Image.new("RGB", (7, 3)).save(file, "PNG")
    with hosted(file.getvalue()) as url:
        answers = [
            toy_nodes.client.post(
                "/v1/chat/completions",
                json={
                    "model": "preset:tiny",
                    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": where}}]}],
                },
            )
            for where in (url, "data:image/png;base64," + base64.b64encode(file.getvalue()).decode())
        ]
    assert [answer.status_code for answer in answers] == [200, 200]
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    assert texts == ["[7x3] "] * 2


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


async def test_more_requests_than_may_wait_are_turned_away_before_the_first_byte(toy_nodes: ServedApp) -> None:
    # Long enough that none has its answer before the last has come, where a busy machine takes them one by one.
    exact = [{"max_tokens": n, "min_tokens": n} for n in (8, 250)]
    body = {
        "model": "preset:tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "high", "format": "wav"},
        "sampling_params_list": [*exact, None],
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
    await until(lambda: nothing_is_left(toy_nodes), "all replicas let go of the requests")


async def test_probes_get_in_while_others_are_turned_away(toy_nodes: ServedApp) -> None:
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
    await until(lambda: nothing_is_left(toy_nodes), "all replicas let go of the requests")


def long_body() -> dict[str, Any]:
    """An answer of 40 s of sound, 1.4 MB as events, which takes 20 s."""
    exact = [{"max_tokens": n, "min_tokens": n} for n in (16, 2000)]
    return {
        "model": "preset:tiny",
        "messages": [{"role": "user", "content": "Tell a long story."}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "high", "format": "pcm16"},
        "sampling_params_list": [*exact, None],
        "stream": True,
    }


async def test_a_client_that_reads_nothing_is_ended_with_its_stages_beside_others(toy_nodes: ServedApp) -> None:
    await until(lambda: nothing_is_left(toy_nodes), "earlier requests are gone")
    before = totals(await whole_scrape())

    async def leaves_it_unread(client: httpx.AsyncClient) -> None:
        with Connections() as connections:
            name = f"unread-{uuid.uuid4().hex[:8]}"
            connections.ask(CHAT, long_body(), **AUTHORIZED, **{"x-request-id": name})
            await until(lambda: is_ended(name), "what is unread is above its limit", 5 * PATIENCE_S)

    async with httpx.AsyncClient(base_url=BASE_URL, headers=AUTHORIZED, timeout=5 * PATIENCE_S) as client:
        await streams_beside(leaves_it_unread, client)
    await until(lambda: nothing_is_left(toy_nodes), "all replicas let go of the request")
    after = totals(await whole_scrape())
    cancelled = ("stage_requests_total", "cancelled", "sound")
    assert after[cancelled] > before[cancelled], "all of it was made"


async def is_ended(name: str) -> bool:
    logs = Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"
    said = "".join(file.read_text() for file in logs.glob("proxy_*.log"))
    return f"request {name}: ended, its client left" in said


async def test_a_fetch_ends_at_the_request_s_own_deadline(toy_nodes: ServedApp) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        image = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{silent.getsockname()[1]}/a.png"}}
        body = {"model": "preset:tiny", "messages": [{"role": "user", "content": [image]}]}
        answer = await asyncio.to_thread(toy_nodes.client.post, CHAT, json=body, headers=DEADLINE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert await nothing_is_left(toy_nodes)


async def test_a_wait_for_a_place_ends_at_the_request_s_own_deadline(toy_nodes: ServedApp) -> None:
    async with httpx.AsyncClient(base_url=BASE_URL, headers=AUTHORIZED, timeout=600) as client:
        whole = long_body() | {"stream": False}  # which keeps no ingress busy
        asked = [asyncio.create_task(client.post(CHAT, json=whole)) for _ in range(24)]

        async def all_places_are_taken() -> bool:
            return totals(await whole_scrape())["ingress_places", "taken"] == 12

        try:
            await until(all_places_are_taken, "all places are taken")
            answer = await client.post(CHAT, json=whole, headers=DEADLINE)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    await until(lambda: nothing_is_left(toy_nodes), "all replicas let go of the requests")


async def test_a_body_that_comes_too_slowly_is_408_and_its_connection_ends(toy_nodes: ServedApp) -> None:
    await until(lambda: nothing_is_left(toy_nodes), "earlier requests are gone")
    with Connections() as connections:
        slow = connections.ask(CHAT, long_body(), missing_bytes=1, **AUTHORIZED)
        answer = await asyncio.to_thread(read_all, slow)
    assert answer.startswith(b"HTTP/1.1 408 ") and b"took more than 3 s" in answer
    assert await nothing_is_left(toy_nodes)
