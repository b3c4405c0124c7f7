"""What comes in at the embedded default: deadlines, slow clients, probes, and the headers that Serve itself reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator
from statistics import median
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.http_app import nothing_is_left
from tests.served.app import BASE_URL, ServedApp, scrape, until
from tests.served.connections import Connections, head, read_all
from tests.served.door_bodies import DEADLINE, DEADLINE_S, body
from tests.server.offering import WAYS, Offering

pytestmark = pytest.mark.full

CHAT = "/v1/chat/completions"
IDLE, SLOW, UNREAD = 1000, 200, 200
WAVE = 100
"""Of those that read nothing, as many as are asked at once: all get a place, or may wait for one."""
TIMES = 9
BUSY_S = 20
"""Within which a machine that others use is quiet for a moment; the slow senders are sent away after a minute."""


def long_body(**options: Any) -> dict[str, Any]:
    """More than a minute's work here."""
    exact = [{"max_tokens": 16}, {"max_tokens": 2000, "min_tokens": 2000}, None]
    audio = {"voice": "Ethan", "format": "wav"}
    return body(modalities=["text", "audio"], audio=audio, sampling_params_list=exact, **options)


# ------------------------------------------------------------ the deadline


async def test_a_body_that_is_not_there_by_the_deadline_is_408(served: ServedApp) -> None:
    with Connections() as connections:
        slow = [connections.ask(path, body(), missing_bytes=5, **DEADLINE) for path in (CHAT, "/v1/audio/speech")]
        answers = await asyncio.gather(*[asyncio.to_thread(read_all, each) for each in slow])
    for answer in answers:
        head_of_answer, _, error = answer.partition(b"\r\n\r\n")
        assert head_of_answer.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head_of_answer.lower()
        assert json.loads(error)["error"]["code"] == "request_timeout"
        assert f"x-request-timeout-seconds = {DEADLINE_S};" in json.loads(error)["error"]["message"]
    await until(lambda: nothing_is_at_the_door(served), "the ingress let go of the bodies")


async def test_work_beyond_a_request_s_own_deadline_ends_in_every_stage(served: ServedApp) -> None:
    whole, streamed = await asyncio.gather(
        *[
            asyncio.to_thread(served.client.post, CHAT, json=long_body(stream=stream), headers=DEADLINE)
            for stream in (False, True)
        ]
    )
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert f"x-request-timeout-seconds = {DEADLINE_S};" in whole.json()["error"]["message"]
    assert json.loads(streamed.text.split("data: ")[-1])["error"]["code"] == "deadline_exceeded"
    await until(lambda: nothing_is_left(served), "all stages let go of the requests")


@pytest.mark.parametrize("sent", ["0", "0.4", "-1", "soon", "nan", "inf", "1e9", ""])
def test_a_deadline_that_is_none_gets_its_sentence(served: ServedApp, sent: str) -> None:
    answer = served.client.post(CHAT, json=body(), headers={"x-request-timeout-seconds": sent})
    assert answer.status_code == 400
    assert "at most 600" in answer.json()["error"]["message"]


# ------------------------------------------- what Serve's own headers may do


def test_no_client_can_have_its_request_go_on_without_it(served: ServedApp) -> None:
    answer = served.client.post(CHAT, json=body(), headers={"x-request-disconnect-disabled": "?1"})
    assert answer.status_code == 400
    assert "x-request-disconnect-disabled" in answer.json()["error"]["message"]


def test_no_client_can_fill_the_logs_with_its_id(served: ServedApp) -> None:
    answer = served.client.post(CHAT, json=body(), headers={"x-request-id": "x" * 30_000})
    assert answer.status_code == 400
    assert "30000 characters" in answer.json()["error"]["message"]


@pytest.mark.parametrize("header", ["x-session-id", "x_session_id", "serve_multiplexed_model_id"])
def test_headers_of_serve_s_routers_choose_nothing(served: ServedApp, header: str) -> None:
    for value in ("@nobody", "x" * 4000):
        assert served.client.post(CHAT, json=body(max_tokens=2), headers={header: value}).status_code == 200


# --------------------------------------- an offer of another protocol


def test_a_client_that_offers_h2c_is_answered(served: ServedApp) -> None:
    sent = json.dumps(body(max_tokens=2)).encode()
    with Offering(BASE_URL) as client:
        answers = [client.ask(CHAT, sent, chunked=chunked, in_two=in_two) for chunked, in_two in WAYS]
    assert [answer.status for answer in answers] == [200] * len(WAYS), answers
    assert all(json.loads(answer.body)["choices"] for answer in answers)


# ---------------------------------------------------------------- probes


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models"])
def test_head_is_answered_as_get_without_the_body(served: ServedApp, path: str) -> None:
    got, headed = served.client.get(path), served.client.head(path)
    assert (headed.status_code, headed.content) == (200, b"")
    assert headed.headers["content-type"] == got.headers["content-type"]
    assert int(headed.headers["content-length"]) > 0


@contextlib.contextmanager
def stopped_controller(served: ServedApp) -> Iterator[None]:
    controller = served.actor("ServeController")
    controller.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        controller.send_signal(signal.SIGCONT)


async def test_a_host_is_ready_whatever_serve_s_controller_does(served: ServedApp) -> None:
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=60) as client:
        await first_text_s(client)  # from now on the ingress knows replicas
        with stopped_controller(served):
            asked = [client.get(path) for path in ("/ready", "/health") for _ in range(50)]
            assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}


# ----------------------------------------------------------- many connections


async def samples_of(served: ServedApp, name: str) -> dict[tuple[str, ...], float]:
    text = await scrape()
    return {
        tuple(value for label, value in sorted(sample.labels.items()) if label != "replica"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"omni_cluster_ingress_{name}"
    }


async def nothing_is_at_the_door(served: ServedApp) -> bool:
    places, uploads = await samples_of(served, "places"), await samples_of(served, "upload_bytes")
    in_flight = await samples_of(served, "requests_in_flight")
    return not any(places.values()) and not any(uploads.values()) and not in_flight.get((CHAT,), 0)


async def first_text_s(client: httpx.AsyncClient) -> float:
    began_s = time.perf_counter()
    async with client.stream("POST", CHAT, json=body(stream=True, max_tokens=4)) as answer:
        async for line in answer.aiter_lines():
            if '"content"' in line and '"content":""' not in line:
                return time.perf_counter() - began_s
    raise AssertionError("no text came")


async def health_s(client: httpx.AsyncClient) -> float:
    began_s = time.perf_counter()
    assert (await client.get("/health")).status_code == 200
    return time.perf_counter() - began_s


async def measured() -> tuple[list[float], list[float]]:
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=60) as client:
        await first_text_s(client)
        texts = [await first_text_s(client) for _ in range(TIMES)]
        return texts, [await health_s(client) for _ in range(TIMES)]


@contextlib.asynccontextmanager
async def slow_senders(connections: Connections, count: int) -> AsyncIterator[None]:
    """Half of them in their headers, half in their bodies, a byte each half second."""
    sockets = [connections.open() for _ in range(count)]
    start = head(CHAT, 100_000)
    for i, each in enumerate(sockets):
        each.sendall(start[:40] if i % 2 else start)
        each.setblocking(False)

    async def drip() -> None:
        while True:
            for i, each in enumerate(sockets):
                with contextlib.suppress(OSError):  # ended by the server, after a minute
                    each.send(b"a" if i % 2 else b" ")
            await asyncio.sleep(0.5)

    dripping = asyncio.create_task(drip())
    try:
        yield
    finally:
        dripping.cancel()
        await asyncio.wait([dripping])


async def leave_unread(served: ServedApp, connections: Connections, count: int) -> None:
    """Answers of some 100 KB, more than the kernel keeps; returns once all are made."""
    options = {"stream": True, "max_tokens": 40, "min_tokens": 40, "logprobs": True, "top_logprobs": 20}
    await until(lambda: nothing_is_at_the_door(served), "earlier requests are counted")
    wanted = await finished(served)

    async def is_made() -> bool:
        return await finished(served) == wanted

    for start in range(0, count, WAVE):
        wave = range(start, min(count, start + WAVE))
        for _ in wave:
            connections.ask(CHAT, body(**options))
        wanted += len(wave)
        await until(is_made, "the answers are made", 300)


async def finished(served: ServedApp) -> float:
    return (await samples_of(served, "requests_total")).get((CHAT, "200"), 0)


async def test_clients_that_send_nothing_send_slowly_or_read_nothing_hurt_nobody(served: ServedApp) -> None:
    quiet, quiet_health = await measured()
    with Connections() as connections:
        for _ in range(IDLE):
            connections.open()
        await leave_unread(served, connections, UNREAD)
        async with slow_senders(connections, SLOW):
            await until(lambda: are_uploading(served, SLOW // 2), "the slow bodies have begun")
            most_health_s, most_text_s = max(0.1, 2 * median(quiet_health)), 2 * median(quiet)
            loaded, health = await measured()
            ends_s = time.monotonic() + BUSY_S  # the machine may have other work
            while (median(loaded) > most_text_s or median(health) > most_health_s) and time.monotonic() < ends_s:
                loaded, health = await measured()
    print(f"first text: quiet {summary(quiet)}, loaded {summary(loaded)}; health: {summary(health)}")
    assert median(health) <= most_health_s
    assert median(loaded) <= most_text_s
    await until(lambda: nothing_is_at_the_door(served), "the ingress let go of all")
    await until(lambda: nothing_is_left(served), "all stages let go of all")


async def are_uploading(served: ServedApp, count: int) -> bool:
    return (await samples_of(served, "requests_in_flight")).get((CHAT,), 0) >= count


def summary(times_s: list[float]) -> str:
    return f"{1000 * min(times_s):.0f} to {1000 * max(times_s):.0f} ms, median {1000 * median(times_s):.0f}"
