"""What one ingress counts of its HTTP requests, and the middleware that sees them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Collection
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_cluster.engine.fan_in import StageEvent
from omni_cluster.engine.metrics import SECONDS
from omni_cluster.server.door import PROBES, Door
from omni_cluster.server.log import logger

OTHER: Final = "other"
"""The endpoint of all paths that are none: a client must not be able to make new ones."""
CLIENT_LEFT: Final = 499
FAILED: Final = 500
FIRST_REFUSAL: Final = 400


class IngressMetrics:
    """The metrics of one ingress, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "omni_cluster_ingress_requests_total",
            "Requests that ended, by HTTP status; 499: the client left before it had the whole answer.",
            ["endpoint", "status"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "omni_cluster_ingress_requests_in_flight",
            "Requests without their whole answer, the scrape among them.",
            ["endpoint"],
            registry=registry,
        )
        self.first_byte = self._seconds("first_byte", "Until the first byte of an answer's body.")
        self.first_audio = self._seconds("first_audio", "Until a stream's first piece of sound came to the ingress.")
        self.answer = self._seconds("answer", "Until the end of a whole answer.")
        self.sent = Counter(
            "omni_cluster_ingress_sent_bytes_total", "Bytes of answers' bodies.", ["endpoint"], registry=registry
        )

    def watch(self, door: Door) -> None:
        """What is at the door, at each scrape."""
        places = Gauge(
            "omni_cluster_ingress_places",
            "Requests that are worked on, state taken, and that wait for that.",
            ["state"],
            registry=self.registry,
        )
        places.labels("taken").set_function(lambda: door.places.taken)
        places.labels("waiting").set_function(lambda: door.places.waiting)
        upload = Gauge(
            "omni_cluster_ingress_upload_bytes",
            "Bytes of bodies that are not worked on yet, 64 KiB for each included.",
            registry=self.registry,
        )
        upload.set_function(lambda: door.uploads.size_bytes)

    def _seconds(self, name: str, what: str) -> Histogram:
        return Histogram(
            f"omni_cluster_ingress_{name}_seconds",
            f"{what} Requests that were not refused.",
            ["endpoint"],
            registry=self.registry,
            buckets=SECONDS,
        )


class HttpMeter:
    """One HTTP request. It has ended when its last byte is handed to the server: the client's next request is later."""

    def __init__(self, metrics: IngressMetrics, endpoint: str) -> None:
        self._metrics = metrics
        self.endpoint = endpoint
        self._started_s = time.perf_counter()
        self._status = FAILED
        self._is_silent = True
        self._has_ended = False
        self._sent = metrics.sent.labels(endpoint)
        metrics.in_flight.labels(endpoint).inc()

    def sends(self, message: Message) -> int | None:
        """Counts a message before it is sent; the status, when it is the answer's last."""
        if message["type"] == "http.response.start":
            self._status = int(message["status"])
        if message["type"] != "http.response.body":
            return None
        body = message.get("body", b"")
        self._sent.inc(len(body))
        if body and self._is_silent:
            self._is_silent = False
            if self._status < FIRST_REFUSAL:
                self._observe(self._metrics.first_byte)
        return None if message.get("more_body", False) else self._status

    def hears(self) -> None:
        """Counts the time to the first piece of sound."""
        self._observe(self._metrics.first_audio)

    def end(self, status: int) -> bool:
        """Counts the end. Returns False if the request had ended before."""
        if self._has_ended:
            return False
        self._has_ended = True
        self._metrics.in_flight.labels(self.endpoint).dec()
        self._metrics.requests.labels(self.endpoint, str(status)).inc()
        if status < FIRST_REFUSAL:
            self._observe(self._metrics.answer)
        return True

    @property
    def passed_s(self) -> float:
        return time.perf_counter() - self._started_s

    def _observe(self, histogram: Histogram) -> None:
        histogram.labels(self.endpoint).observe(self.passed_s)


class Metered:
    """ASGI middleware, outermost: counts every HTTP request, and logs one line of it at its end.

    Handlers find the request's `HttpMeter` as `request.state.meter`.
    """

    def __init__(self, app: ASGIApp, metrics: IngressMetrics, endpoints: Collection[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._endpoints = frozenset(endpoints)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        meter = HttpMeter(self._metrics, self._endpoint(scope))
        scope["state"] = {**(scope.get("state") or {}), "meter": meter}

        async def counted(message: Message) -> None:
            if (status := meter.sends(message)) is not None:
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


def end(scope: Scope, meter: HttpMeter, status: int) -> bool:
    """Counts and logs how the request ended, unless it has ended before; says whether this was its end."""
    is_end = meter.end(status)
    if is_end and meter.endpoint not in PROBES:  # who watches a server asks every few seconds
        request_id = scope["state"].get("request_id", "-")
        logger.info("request %s: %s answered %d after %.3f s", request_id, meter.endpoint, status, meter.passed_s)
    return is_end


async def heard(events: AsyncGenerator[StageEvent, None], meter: HttpMeter) -> AsyncGenerator[StageEvent, None]:
    """The events as they come; the first with sound is timed."""
    is_silent = True
    async with contextlib.aclosing(events):
        async for event in events:
            if is_silent and event.chunk.audio is not None:
                is_silent = False
                meter.hears()
            yield event
