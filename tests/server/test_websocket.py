"""An endpoint on a WebSocket is one file and one line; each of its responses is admitted as an HTTP request is."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket

from omni_cluster.config.limits import Limits
from omni_cluster.engine.exposition import ReplicaMetrics, text_of
from omni_cluster.engine.pipeline import answer_progress
from omni_cluster.server.app import ENDPOINTS, Services
from omni_cluster.server.refusals import error_answer
from omni_cluster.server.streamed import open_stream
from omni_cluster.types.inputs import OmniRequest
from tests.server.keyed import ONE, config_of
from tests.server.samples import Totals, totals
from tests.server.speaker import Face, face_of

pytestmark = pytest.mark.usefixtures("tiny")
PATH = "/v1/words"
PATIENCE_S = 60


class WordsEndpoint:
    """Answers each text with the pipeline's words."""

    def __init__(self, services: Services) -> None:
        self._its = services

    def add_to(self, api: FastAPI) -> None:
        api.add_api_websocket_route(PATH, self.words)

    async def words(self, socket: WebSocket) -> None:
        await socket.accept()
        async for text in socket.iter_text():
            try:
                await self._answer(socket, text)
            except Exception as error:  # the boundary to the client: every error becomes an answer
                await socket.send_json(error_answer(error)[1])

    async def _answer(self, socket: WebSocket, text: str) -> None:
        pipeline, request_id = self._its.pipeline, socket.state.request_id
        async with self._its.admission.admit(socket) as admitted:
            request = await self._its.reader.off_loop(lambda: self._request(request_id, text))
            answer = await open_stream(pipeline, request, admitted, answer_progress(pipeline.bound))
            async with contextlib.aclosing(answer):
                async for chunk in answer:
                    admitted.meter.send(chunk.text.encode())
                    await socket.send_json({"text": chunk.text, "ended": chunk.finish_reason})

    def _request(self, request_id: str, text: str) -> OmniRequest:
        prompt = self._its.pipeline.bound.family.render([{"role": "user", "content": text}])
        return self._its.builder.build(OmniRequest(request_id, prompt, wants_audio=False))


class Socket:
    """A client's end of a WebSocket."""

    def __init__(self, face: Face, key: str, **headers: str) -> None:
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._told: asyncio.Queue[Any] = asyncio.Queue()
        named = {"authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in headers.items()}}
        scope = {
            "type": "websocket",
            "path": PATH,
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in named.items()],
            "extensions": {"websocket.http.response": {}},
            "subprotocols": [],
        }
        self._sent.put_nowait({"type": "websocket.connect"})
        self._served = asyncio.ensure_future(face.app(scope, self._sent.get, self._told.put))

    async def message(self) -> Any:
        return await asyncio.wait_for(self._told.get(), PATIENCE_S)

    def ask(self) -> None:
        self._sent.put_nowait({"type": "websocket.receive", "text": "Hello"})

    async def told(self) -> Any:
        return json.loads((await self.message())["text"])

    async def answer(self) -> str:
        """What is said until the end."""
        words = ""
        while not (told := await self.told())["ended"]:
            words += told["text"]
        return words

    async def leave(self) -> None:
        self._sent.put_nowait({"type": "websocket.disconnect", "code": 1000})
        await asyncio.wait_for(self._served, PATIENCE_S)

    async def break_off(self) -> None:
        self._served.cancel()
        await asyncio.gather(self._served, return_exceptions=True)


@contextlib.asynccontextmanager
async def face_with_words(folder: Path, limits: Limits | None = None, **api: Any) -> AsyncIterator[Face]:
    config = config_of(folder, limits, **(api or {"requests_per_minute": 1_000.0}))
    async with face_of(config, endpoints=(*ENDPOINTS, WordsEndpoint)) as face:
        yield face


async def connected(face: Face, **headers: str) -> Socket:
    socket = Socket(face, ONE, **headers)
    assert (await socket.message())["type"] == "websocket.accept"
    return socket


def counted(face: Face) -> Totals:
    return totals(text_of(ReplicaMetrics.of(face.server.metrics.registry, "i1").metrics).decode())


def requests(face: Face) -> dict[str, float]:
    """How many were counted at the endpoint, by status; none is left."""
    assert counted(face)["ingress_requests_in_flight", PATH] == face.server.admission.slots.taken == 0
    return {key[2]: value for key, value in counted(face).items() if key[:2] == ("ingress_requests_total", PATH)}


def refusals(face: Face) -> dict[str, float]:
    """The same of refusals, by reason."""
    return {key[2]: value for key, value in counted(face).items() if key[:2] == ("ingress_refusals_total", PATH)}


async def test_responses_after_one_another_on_one_connection_are_admitted_and_counted_one_by_one(
    tmp_path: Path,
) -> None:
    async with face_with_words(tmp_path, Limits(max_ongoing_requests=1, max_queued_requests=0)) as face:
        socket = await connected(face, x_request_id="mine")
        for _ in range(2):
            socket.ask()
            assert await socket.answer() == "word"
        await socket.leave()
        assert requests(face) == {"200": 2} and refusals(face) == {}
        assert counted(face)["ingress_sent_bytes_total", PATH] == 8
        assert counted(face)["ingress_answer_seconds_count", PATH] == 2
        assert counted(face)["ingress_first_byte_seconds_count", PATH] == 2
        assert len(set(face.speaker.begun)) == 2 and all(each.startswith("mine-") for each in face.speaker.begun)


async def test_a_connection_without_a_key_is_refused_and_counted_once(tmp_path: Path) -> None:
    async with face_with_words(tmp_path) as face:
        socket = Socket(face, "wrong")
        start, body = await socket.message(), await socket.message()
        assert (start["type"], start["status"]) == ("websocket.http.response.start", 401)
        assert json.loads(body["body"])["error"]["code"] == "invalid_api_key"
        await socket.leave()
        assert (requests(face), refusals(face)) == ({"401": 1}, {"invalid_api_key": 1})


async def test_a_response_that_finds_no_slot_is_refused_and_counts_not_for_its_key(tmp_path: Path) -> None:
    limits = Limits(max_ongoing_requests=1, max_queued_requests=0)
    async with face_with_words(tmp_path, limits, requests_per_minute=2.0) as face:
        face.speaker.may_speak.clear()
        first, second = await connected(face), await connected(face)
        first.ask()
        assert (await first.told())["text"] == "word"
        for _ in range(3):
            second.ask()
            assert (await second.told())["error"]["code"] == "too_many_requests"
        face.speaker.may_speak.set()
        assert await first.answer() == ""
        await first.leave()
        second.ask()
        assert await second.answer() == "word"
        await second.leave()
        assert (requests(face), refusals(face)) == ({"200": 2, "429": 3}, {"too_many_requests": 3})


async def test_a_key_beyond_its_minute_is_refused_on_a_connection_that_is_open(tmp_path: Path) -> None:
    async with face_with_words(tmp_path, requests_per_minute=2.0) as face:
        socket = await connected(face)
        for _ in range(2):
            socket.ask()
            assert await socket.answer() == "word"
        socket.ask()
        assert "may send 2 requests a minute" in (await socket.told())["error"]["message"]
        face.now_s += 30
        socket.ask()
        assert await socket.answer() == "word"
        await socket.leave()
        assert (requests(face), refusals(face)) == ({"200": 3, "429": 1}, {"rate_limit_exceeded": 1})


async def test_each_response_has_the_deadline_of_the_handshake_s_header(tmp_path: Path) -> None:
    async with face_with_words(tmp_path) as face:
        face.speaker.may_speak.clear()
        socket = await connected(face, x_request_timeout_seconds="2")
        for _ in range(2):
            socket.ask()
            assert (await socket.told())["text"] == "word"
            assert (await socket.told())["error"]["code"] == "deadline_exceeded"
        await socket.leave()
        assert face.speaker.running == 0
        assert (requests(face), refusals(face)) == ({"504": 2}, {"deadline_exceeded": 2})


async def test_a_deadline_that_is_none_is_refused_as_over_http(tmp_path: Path) -> None:
    async with face_with_words(tmp_path) as face:
        socket = await connected(face, x_request_timeout_seconds="soon")
        socket.ask()
        assert "is 'soon', but it should be one number" in (await socket.told())["error"]["message"]
        await socket.leave()
        assert (requests(face), refusals(face)) == ({"400": 1}, {"invalid_value": 1})


async def test_a_closing_server_refuses_the_next_response(tmp_path: Path) -> None:
    async with face_with_words(tmp_path) as face:
        socket = await connected(face)
        await face.server.let_all_end()
        socket.ask()
        assert (await socket.told())["error"]["code"] == "server_closing"
        await socket.leave()
        assert (requests(face), refusals(face)) == ({"503": 1}, {"server_closing": 1})


async def test_a_client_that_leaves_in_the_midst_ends_its_response(tmp_path: Path) -> None:
    async with face_with_words(tmp_path) as face:
        face.speaker.may_speak.clear()
        socket = await connected(face)
        socket.ask()
        assert (await socket.told())["text"] == "word"
        await socket.break_off()
        assert face.speaker.running == 0
        assert (requests(face), refusals(face)) == ({"499": 1}, {})
