"""What the HTTP face counts and logs of its requests, and the text that Prometheus reads."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from omni_cluster.engine.answer import AnswerProgress
from omni_cluster.engine.exposition import ReplicaMetrics, merged, text_of
from omni_cluster.engine.fan_in import Recovery, StageEvent
from omni_cluster.engine.metrics import StageMetrics
from omni_cluster.engine.playback import Playback
from omni_cluster.openai_api.access import ApiKeys, guarded
from omni_cluster.server.log import logger
from omni_cluster.server.metrics import IngressMetrics, Metered, reason_of
from omni_cluster.server.streamed import AnswerStream
from omni_cluster.types.outputs import AudioChunk, StageChunk
from tests.server.samples import Totals, totals

# ------------------------------------------------------------ the middleware


async def streamed(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        for part in (b"", b"four", b"five!"):
            yield part

    return StreamingResponse(parts())


def answer_of(request: Request, events: Any) -> AnswerStream[AnswerProgress]:
    return AnswerStream(events, AnswerProgress({"s": "text"}), request.state.meter.observe)


async def sounding(request: Request) -> Response:
    audio = StageChunk(audio=AudioChunk(0, np.zeros(4, np.float32), 24_000))

    async def events() -> Any:
        for chunk in (StageChunk(text="a"), audio, audio):
            yield StageEvent("s", chunk)

    return PlainTextResponse(str(len([chunk async for chunk in answer_of(request, events())])))


async def recovering(request: Request) -> Response:
    async def events() -> Any:
        yield StageEvent("s", StageChunk(text="a"))
        yield StageEvent("s", StageChunk(text="b"), Recovery(("thinker", "talker"), 0.25))

    return PlainTextResponse("".join([chunk.text async for chunk in answer_of(request, events())]))


async def broken(request: Request) -> Response:
    raise ZeroDivisionError


async def breaks_off(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        yield b"four"
        raise ZeroDivisionError

    return StreamingResponse(parts())


class Face:
    """A small API behind the middleware and all that stands before ours."""

    def __init__(self, *keys: bytes) -> None:
        self.metrics = IngressMetrics()
        handlers = (streamed, sounding, recovering, broken, breaks_off)
        routes = [Route(f"/{handler.__name__}", handler) for handler in handlers]
        app = guarded(Starlette(routes=routes), keys=ApiKeys(keys), origins=(), answers_id=False)
        app = Metered(app, self.metrics, [route.path for route in routes])
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://face")

    def totals(self) -> Totals:
        return totals(text_of(ReplicaMetrics.of(self.metrics.registry, "i1").metrics).decode())


async def test_a_request_is_counted_with_its_bytes_and_its_times() -> None:
    face = Face()
    assert (await face.client.get("/streamed")).content == b"fourfive!"
    counted = face.totals()
    assert counted["ingress_requests_total", "/streamed", "200"] == 1
    assert counted["ingress_sent_bytes_total", "/streamed"] == 9
    assert counted["ingress_first_byte_seconds_count", "/streamed"] == 1
    assert counted["ingress_answer_seconds_count", "/streamed"] == 1
    assert counted["ingress_requests_in_flight", "/streamed"] == 0


async def test_the_first_sound_is_timed_once() -> None:
    face = Face()
    assert (await face.client.get("/sounding")).text == "3"
    assert face.totals()["ingress_first_audio_seconds_count", "/sounding"] == 1


async def test_a_stream_s_player_is_counted_once_and_no_other_answer_has_one() -> None:
    face = Face()
    for path in ("/sounding", "/streamed"):
        await face.client.get(path)
    counted = face.totals()
    assert counted["ingress_stall_seconds_count", "/sounding"] == 1
    assert counted["ingress_stall_seconds_count", "/streamed"] == 0


def test_a_player_stands_still_from_the_end_of_a_piece_to_the_next() -> None:
    player = Playback()
    assert not player.has_begun
    for now_s in (7.0, 7.5, 9.25, 10.75):  # plays until 9, stands still until 9.25, and again from 10.25 to 10.75
        player.deliver(1.0, now_s)
    assert (player.has_begun, player.stall_s) == (True, 0.75)


async def test_what_a_request_survived_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    face = Face()
    with caplog.at_level("INFO", logger.name):
        assert (await face.client.get("/recovering")).text == "ab"
    counted = face.totals()
    assert [counted["ingress_recovered_total", "/recovering", each] for each in ("thinker", "talker")] == [1, 1]
    assert counted["ingress_recovery_stall_seconds_sum", "/recovering"] == 0.25
    assert caplog.messages[-1].endswith(", recovered from thinker and talker in 250 ms")


@pytest.mark.parametrize("path", ["/broken", "/breaks_off"])
async def test_what_breaks_is_500_and_in_no_answer_s_time(path: str) -> None:
    face = Face()
    await face.client.get(path)
    counted = face.totals()
    assert counted["ingress_requests_total", path, "500"] == 1
    assert counted["ingress_answer_seconds_count", path] == 0
    assert counted["ingress_requests_in_flight", path] == 0


async def test_refusals_are_counted_by_their_status_and_in_no_time() -> None:
    face = Face(b"k" * 16)
    assert (await face.client.get("/streamed")).status_code == 401
    counted = face.totals()
    assert counted["ingress_requests_total", "/streamed", "401"] == 1
    assert counted["ingress_first_byte_seconds_count", "/streamed"] == 0
    assert counted["ingress_answer_seconds_count", "/streamed"] == 0
    assert counted["ingress_refusals_total", "/streamed", "invalid_api_key"] == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error": {"message": "a", "code": "rate_limit_exceeded", "param": null}}', "rate_limit_exceeded"),
        (b'{"error": {"message": "a", "code": null}}', "none"),
        (b'{"error": "a"}', "none"),
        (b'{"error": {"code": "x"', "none"),
        (b"Internal Server Error", "none"),
        (b"\xff", "none"),
    ],
)
def test_the_reason_of_a_refusal_is_the_code_that_its_client_reads(body: bytes, reason: str) -> None:
    assert reason_of(body) == reason


async def test_a_path_of_the_client_s_own_makes_no_label_of_its_own() -> None:
    face = Face()
    for path in ("/nowhere", "/streamed/x"):
        assert (await face.client.get(path)).status_code == 404
    assert face.totals()["ingress_requests_total", "other", "404"] == 2


async def test_a_client_that_leaves_is_499() -> None:
    metrics, in_flight = IngressMetrics(), asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"four", "more_body": True})
        in_flight.set()
        await asyncio.Event().wait()

    async def nothing(*_: Any) -> None:
        pass

    request = asyncio.create_task(Metered(endless, metrics, ["/a"])({"type": "http", "path": "/a"}, nothing, nothing))
    await in_flight.wait()
    assert metrics.registry.get_sample_value("omni_cluster_ingress_requests_in_flight", {"endpoint": "/a"}) == 1
    request.cancel()
    await asyncio.wait([request])
    assert request.cancelled()
    counted = totals(text_of(ReplicaMetrics.of(metrics.registry, "i1").metrics).decode())
    assert counted["ingress_requests_total", "/a", "499"] == 1
    assert counted["ingress_requests_in_flight", "/a"] == 0
    assert counted["ingress_sent_bytes_total", "/a"] == 4


async def test_the_log_has_a_line_of_each_request_but_probes(caplog: pytest.LogCaptureFixture) -> None:
    metrics = IngressMetrics()
    app = guarded(Starlette(routes=[Route("/streamed", streamed)]), keys=ApiKeys(), origins=())
    transport = httpx.ASGITransport(Metered(app, metrics, ["/streamed", "/health"]))
    with caplog.at_level("INFO", logger.name):
        async with httpx.AsyncClient(transport=transport, base_url="http://face") as client:
            await client.get("/streamed", headers={"x-request-id": "mine"})
            await client.get("/health")
    (line,) = [record.getMessage() for record in caplog.records if record.name == logger.name]
    assert re.fullmatch(r"request mine: /streamed answered 200 after \d+\.\d{3} s", line)


# ------------------------------------------------------- one text of all


def of_replica(replica: str, finished: int) -> ReplicaMetrics:
    metrics = StageMetrics()
    for _ in range(finished):
        metrics.begin().end("finished")
    return ReplicaMetrics.of(metrics.registry, replica, stage="first")


def test_replicas_are_samples_of_one_metric_with_one_help_line() -> None:
    text = text_of(merged([*of_replica("a", 2).metrics, *of_replica("b", 3).metrics])).decode()
    finished = {
        sample.labels["replica"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.endswith("requests_total") and sample.labels["outcome"] == "finished"
    }
    assert finished == {"a": 2, "b": 3}
    names = re.findall(r"^# HELP (\S+) ", text, re.MULTILINE)
    assert len(names) == len(set(names)) > 5
    assert "_created" not in text


def test_an_answer_of_nothing_is_an_empty_text() -> None:
    assert text_of(merged(ReplicaMetrics.of(CollectorRegistry(), "a").metrics)) == b""
