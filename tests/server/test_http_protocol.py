"""Requests that offer a protocol besides HTTP/1.1 are served as those that do not."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from websockets.asyncio.client import connect

from omni_cluster.config.loader import load_config
from omni_cluster.models.registry import known_families
from omni_cluster.serve_local import listening
from omni_cluster.server.http_protocol import HttpProtocol, use_in_this_process
from tests.configs import TINY_CONFIG
from tests.server.offering import OFFER, WAYS, Offering, head
from tests.server.speaker import CHAT, speaking

BODY = b'{"said": "hello"}'
LENGTH = {"Content-Length": str(len(BODY))}
MANY = 3000
"""Requests in one segment: more than Python lets functions call each other."""


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with what came; over a WebSocket with the same word."""
    if scope["type"] == "websocket":
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": (await receive())["text"]})
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    said = json.dumps([scope["method"], scope["path"], body.decode(), headers]).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(said))]})
    await send({"type": "http.response.body", "body": said})


@contextlib.asynccontextmanager
async def served_by(**options: Any) -> AsyncIterator[str]:
    with listening("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(echo, lifespan="off", log_level="critical", **options))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await serving


@pytest.fixture(params=["chosen", "everywhere"])
async def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """A server of ours, and one that others made before they had our code."""
    if request.param == "chosen":
        async with served_by(http=HttpProtocol) as url:
            yield url
        return
    async with served_by() as url:
        monkeypatch.setattr(HttpToolsProtocol, "__init__", HttpToolsProtocol.__init__)  # put back at the end
        use_in_this_process()
        yield url


async def test_the_body_is_read_however_it_comes_and_the_connection_goes_on(url: str) -> None:
    def asked() -> None:
        with Offering(url) as client:
            for chunked, in_two in WAYS:
                answered = client.ask("/path?q=1", BODY, chunked=chunked, in_two=in_two)
                assert answered.status == 200
                method, path, body, headers = json.loads(answered.body)
                assert (method, path, body) == ("POST", "/path", BODY.decode())
                assert not {"upgrade", "http2-settings"} & set(headers) and not headers["connection"]
                assert headers["content-type"] == "application/json"

    await asyncio.to_thread(asked)


async def test_a_head_that_comes_byte_by_byte_is_read_too(url: str) -> None:
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    sent = head("POST", "/", OFFER | LENGTH) + BODY
    for i in range(len(sent)):
        writer.write(sent[i : i + 1])
        await writer.drain()
        await asyncio.sleep(0)
    assert (await reader.readline()).split()[1] == b"200"
    writer.close()


async def test_many_requests_in_one_segment_are_all_answered(url: str) -> None:
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"), limit=1 << 20)
    writer.write(head("GET", "/", OFFER) * MANY + head("POST", "/last", {"Connection": "close"} | LENGTH) + BODY)
    answers = await asyncio.wait_for(reader.read(), 60)
    assert answers.count(b"HTTP/1.1 200") == MANY + 1
    assert json.loads(answers.rpartition(b"\r\n\r\n")[2])[1:3] == ["/last", BODY.decode()]
    writer.close()


@pytest.mark.parametrize(
    ("headers", "kept"),
    [
        ({"Connection": "upgrade, close", "Upgrade": "h2c"}, "close"),
        ({"Connection": "Upgrade", "Upgrade": "TLS/1.0, HTTP/2.0"}, ""),
        ({"Connection": "keep-alive, Upgrade", "Upgrade": "h2c, websocket"}, "keep-alive"),
    ],
)
async def test_any_offer_but_a_websocket_is_ignored_and_the_rest_of_the_header_is_not(
    url: str, headers: dict[str, str], kept: str
) -> None:
    def asked() -> Any:
        with Offering(url) as client:
            client.send(head("POST", "/", headers | LENGTH) + BODY)
            return json.loads(client.answered().body)

    _, _, body, seen = await asyncio.to_thread(asked)
    assert (body, seen["connection"]) == (BODY.decode(), kept)


@pytest.mark.parametrize("bad", [{"Content-Length": "17", "Transfer-Encoding": "chunked"}, {"Content-Length": "x"}])
async def test_a_head_that_is_refused_without_an_offer_is_refused_with_one(url: str, bad: dict[str, str]) -> None:
    def asked() -> int:
        with Offering(url) as client:
            client.send(head("POST", "/", OFFER | bad) + BODY)
            return client.answered().status

    assert await asyncio.to_thread(asked) == 400


async def test_a_websocket_is_one(url: str) -> None:
    async with connect(url.replace("http", "ws", 1)) as socket:
        await socket.send("word")
        assert await socket.recv() == "word"


# ------------------------------------------------------------ the API


async def test_a_client_that_offers_h2c_is_answered(tiny: Path) -> None:
    body = json.dumps({"model": "preset:tiny", "messages": [{"role": "user", "content": "Hi"}]}).encode()

    def asked(url: str) -> list[int]:
        with Offering(url) as client:
            return [client.ask(CHAT, body, chunked=chunked, in_two=in_two).status for chunked, in_two in WAYS]

    async with speaking(load_config(TINY_CONFIG, known_families=known_families())) as url:
        assert await asyncio.to_thread(asked, url) == [200] * len(WAYS)
