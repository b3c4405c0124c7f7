"""What one ingress counts of its responses, and the middleware that sees those to HTTP requests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from omni_cluster.engine import metric_definitions as define
from omni_cluster.engine.fan_in import Recovery, StageEvent
from omni_cluster.engine.playback import Playback
from omni_cluster.server.body import Uploads
from omni_cluster.server.log import logger
from omni_cluster.server.refusals import status_and_body
from omni_cluster.server.slots import AdmissionSlots
from omni_cluster.types.outputs import AudioChunk

PROBES: Final = frozenset({"/health", "/ready", "/metrics"})
"""Paths that never wait behind requests, and are not logged."""
OTHER: Final = "other"
"""The endpoint of all paths that are none: a client must not be able to make new ones."""
OK: Final = 200
FORBIDDEN: Final = 403
CLIENT_LEFT: Final = 499
FAILED: Final = 500
FIRST_REFUSAL: Final = 400
NO_REASON: Final = "none"
"""The reason of an error that says none."""


class IngressMetrics:
    """The metrics of one ingress, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = define.INGRESS_REQUESTS.counter(registry)
        self.refusals = define.REFUSALS.counter(registry)
        self.in_flight = define.IN_FLIGHT.gauge(registry)
        self.first_byte = define.FIRST_BYTE.histogram(registry)
        self.first_audio = define.FIRST_AUDIO.histogram(registry)
        self.stall = define.STALL.histogram(registry)
        self.answer = define.ANSWER.histogram(registry)
        self.recovered = define.RECOVERED.counter(registry)
        self.recovery_stall = define.RECOVERY_STALL.histogram(registry)
        self.sent = define.SENT_BYTES.counter(registry)

    def watch(self, slots: AdmissionSlots, uploads: Uploads) -> None:
        """Reads them at each scrape."""
        gauge = define.PLACES.gauge(self.registry)
        gauge.labels("taken").set_function(lambda: slots.taken)
        gauge.labels("waiting").set_function(lambda: slots.waiting)
        define.UPLOAD_BYTES.gauge(self.registry).set_function(lambda: uploads.size_bytes)

    def watch_sessions(self, count: Callable[[], int]) -> None:
        """The same."""
        define.SESSIONS.gauge(self.registry).set_function(count)

    @contextlib.contextmanager
    def response(self, endpoint: str, request_id: str) -> Iterator[ResponseMeter]:
        """Counts and logs one response of a connection, with the status of what is raised inside."""
        meter, status = ResponseMeter(self, endpoint), CLIENT_LEFT
        meter.start(OK)
        try:
            yield meter
            status = OK
        except WebSocketDisconnect:
            raise
        except Exception as error:
            status, body = status_and_body(error)
            meter.reason = body["error"]["code"] or NO_REASON
            raise
        finally:
            end_logged(meter, status, request_id)


class _Error(msgspec.Struct):
    code: str | None = None


class _Refusal(msgspec.Struct):
    error: _Error


def reason_of(body: bytes) -> str:
    """The code of an error's answer, as its client reads it: the codes are our own, and few."""
    try:
        return msgspec.json.decode(body, type=_Refusal).error.code or NO_REASON
    except msgspec.DecodeError:
        return NO_REASON


class ResponseMeter:
    """One response, of an HTTP request or on a WebSocket.

    It has ended when its last byte is handed to the server: the client's next request is later.
    """

    def __init__(self, metrics: IngressMetrics, endpoint: str) -> None:
        self._metrics = metrics
        self.endpoint = endpoint
        self._started_s = time.perf_counter()
        self.status = FAILED
        self._is_silent = True
        self._has_ended = False
        self._recoveries: list[Recovery] = []
        self._playback = Playback()
        self.reason = NO_REASON
        self._sent = metrics.sent.labels(endpoint)
        metrics.in_flight.labels(endpoint).inc()

    def start(self, status: int) -> None:
        """Counts nothing yet: a stream that has begun may fail."""
        self.status = status

    def send(self, body: bytes) -> None:
        """Counts a part of the body before it is sent."""
        if body and self._is_silent and self.status >= FIRST_REFUSAL:
            self._is_silent = False
            self.reason = reason_of(body)
        self.count_sent(len(body))

    def count_sent(self, num_bytes: int) -> None:
        """Counts what is sent by its size, as of a socket's events."""
        self._sent.inc(num_bytes)
        if num_bytes and self._is_silent:
            self._is_silent = False
            self._observe(self._metrics.first_byte)

    def observe(self, event: StageEvent) -> None:
        """Counts what a stream's event says of the stages: what the request survived, and its sound."""
        self.observe_recovery(event)
        if event.chunk.audio is not None:
            self.observe_sound(event.chunk.audio)

    def observe_sound(self, audio: AudioChunk) -> None:
        """Counts the time to the first piece of sound, and until when its player has some."""
        if not self._playback.has_begun:
            self._observe(self._metrics.first_audio)
        self._playback.deliver(len(audio.samples) / audio.sample_rate_hz, self.passed_s)

    def observe_recovery(self, event: StageEvent) -> None:
        """Counts what the request survived before this event."""
        if (recovery := event.recovery) is None:
            return
        self._recoveries.append(recovery)
        for stage in recovery.stages:
            self._metrics.recovered.labels(self.endpoint, stage).inc()
        self._metrics.recovery_stall.labels(self.endpoint).observe(recovery.stall_s)

    @property
    def recovered(self) -> str:
        """What the request survived, for its line in the log."""
        return "".join(
            f", recovered from {' and '.join(each.stages)} in {each.stall_s * 1000:.0f} ms" for each in self._recoveries
        )

    def end(self, status: int) -> bool:
        """Counts the end. Returns False if the request had ended before."""
        if self._has_ended:
            return False
        self._has_ended = True
        self._metrics.in_flight.labels(self.endpoint).dec()
        self._metrics.requests.labels(self.endpoint, str(status)).inc()
        if status < FIRST_REFUSAL:
            self._observe(self._metrics.answer)
        elif status != CLIENT_LEFT:
            self._metrics.refusals.labels(self.endpoint, self.reason).inc()
        if self._playback.has_begun:
            self._metrics.stall.labels(self.endpoint).observe(self._playback.stall_s)
        return True

    def drop(self) -> None:
        """It is no response, and counts nowhere."""
        if not self._has_ended:
            self._has_ended = True
            self._metrics.in_flight.labels(self.endpoint).dec()

    @property
    def passed_s(self) -> float:
        return time.perf_counter() - self._started_s

    def _observe(self, histogram: Histogram) -> None:
        histogram.labels(self.endpoint).observe(self.passed_s)


class Metered:
    """ASGI middleware, outermost: counts every HTTP request, and logs one line of it at its end.

    Handlers find the request's `ResponseMeter` as `request.state.meter`. Of a WebSocket a handshake that is refused is
    counted; one that is accepted has responses, which `Admission.admit` counts.
    """

    def __init__(self, app: ASGIApp, metrics: IngressMetrics, endpoints: Collection[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._endpoints = frozenset(endpoints)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        meter = ResponseMeter(self._metrics, self._endpoint(scope))
        scope["state"] = {**(scope.get("state") or {}), "meter": meter}

        async def counted(message: Message) -> None:
            if (status := counted_message(meter, message)) is not None:
                end(scope, meter, status)
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            if end(scope, meter, FAILED):
                logger.exception("%s broke", meter.endpoint)
            raise
        finally:
            end(scope, meter, CLIENT_LEFT)

    def _endpoint(self, scope: Scope) -> str:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return path if path in self._endpoints else OTHER


def counted_message(meter: ResponseMeter, message: Message) -> int | None:
    """Counts an ASGI message before it is sent; the status, when it is the answer's last."""
    kind = message["type"].removeprefix("websocket.")
    if kind == "accept":
        meter.drop()
    if kind == "close":
        return FORBIDDEN  # what a client reads of a handshake that is closed; after that it is dropped
    if kind == "http.response.start":
        meter.start(int(message["status"]))
    if kind != "http.response.body":
        return None
    meter.send(message.get("body", b""))
    return None if message.get("more_body", False) else meter.status


def end(scope: Scope, meter: ResponseMeter, status: int) -> bool:
    """Counts and logs how the request ended, unless it has ended before; says whether this was its end."""
    return end_logged(meter, status, scope["state"].get("request_id", "-"))


def end_logged(meter: ResponseMeter, status: int, request_id: str) -> bool:
    """The same of a response by the id that its log line has."""
    is_end = meter.end(status)
    if is_end and meter.endpoint not in PROBES:  # probes come every few seconds
        line = "request %s: %s answered %d after %.3f s%s"
        logger.info(line, request_id, meter.endpoint, status, meter.passed_s, meter.recovered)
    return is_end
