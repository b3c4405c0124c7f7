"""How a response is let in: until when it may take, what may be uploaded for it, and when it may be worked on."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncIterator, Iterator
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from omni_cluster.config.access import ApiConfig
from omni_cluster.config.limits import Limits
from omni_cluster.engine.deadline import Deadline, DeadlineExceeded
from omni_cluster.openai_api.access import REQUEST_ID_HEADER
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.server.body import JSON_TYPE, Uploads, read_body, too_slow
from omni_cluster.server.closing import Closing
from omni_cluster.server.metrics import PROBES, IngressMetrics, ResponseMeter
from omni_cluster.server.quotas import Allowance, Clock, Quotas
from omni_cluster.server.refusals import refusal
from omni_cluster.server.slots import AdmissionSlots

TIMEOUT_HEADER: Final = "x-request-timeout-seconds"
DETACH_HEADER: Final = "x-request-disconnect-disabled"
MOST_ID_CHARS: Final = 1024
LEAST_AHEAD_S: Final = 0.2
MOST_AHEAD_S: Final = 2.0
"""Serve's proxy reads `TIMEOUT_HEADER` too, and answers in a form of its own: ours has to be there before."""
LEAST_TIMEOUT_S: Final = 0.5
"""Of less, `LEAST_AHEAD_S` would leave too little. Below some 0.05 s Serve's own answer may come before any of ours."""


def deadline_of(headers: Headers, most_s: float) -> Deadline:
    """What the client asks for by `TIMEOUT_HEADER`, else `most_s`. Raises BadRequest."""
    sent = headers.getlist(TIMEOUT_HEADER)
    if not sent:
        return Deadline(most_s)
    asked_s = _number(sent[0]) if len(sent) == 1 else math.nan
    least_s = min(LEAST_TIMEOUT_S, most_s)
    if not least_s <= asked_s <= most_s:
        raise BadRequest(
            f"The header {TIMEOUT_HEADER} is {', '.join(sent)[:60]!r}, but it should be one number of seconds, at "
            f"least {least_s:g} and at most {most_s:g}.",
            code="invalid_value",
        )
    ahead_s = min(MOST_AHEAD_S, max(LEAST_AHEAD_S, asked_s / 5))
    return Deadline(asked_s - ahead_s, f"its header {TIMEOUT_HEADER} = {asked_s:g}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def check_headers(headers: Headers) -> None:
    """Raises BadRequest for what Serve, which reads these headers too, would let a client do."""
    if DETACH_HEADER in headers:
        raise BadRequest(
            f"The header {DETACH_HEADER} is {headers[DETACH_HEADER][:60]!r}, but it is not accepted: a request ends "
            "with its client.",
            code="invalid_value",
        )
    size = len(headers.get(REQUEST_ID_HEADER, ""))
    if size > MOST_ID_CHARS:  # every line that Serve logs of the request has it
        raise BadRequest(
            f"The header {REQUEST_ID_HEADER} has {size} characters, but at most {MOST_ID_CHARS} are accepted.",
            code="invalid_value",
        )


class AdmittedRequest:
    """One response that may cost something: its deadline, its slot, what its key may ask for, and what is counted."""

    def __init__(self, admission: Admission, deadline: Deadline, allowance: Allowance, meter: ResponseMeter) -> None:
        self._admission = admission
        self.deadline = deadline
        self.allowance = allowance
        self.meter = meter
        self._has_body = False
        self._has_slot = False

    async def body(self, request: Request, max_bytes: int, media_type: str = JSON_TYPE) -> bytearray:
        """The body, once it is whole and the request has its slot. Raises BadRequest, as soon as it can tell."""
        with self.allowance.request():
            self._admission.slots.check_room()
            return await self._body(request, max_bytes, media_type)

    async def _body(self, request: Request, max_bytes: int, media_type: str) -> bytearray:
        limits, uploads = self._admission.limits, self._admission.uploads
        async with uploads.open() as upload:
            body = await read_body(request, max_bytes, limits.upload_timeout_s, uploads, upload, media_type)
            self._has_body = True
            await self._take_slot()
        return body

    async def without_body(self) -> None:
        """Takes the slot of a response whose input is here. Raises BadRequest, as `body` does."""
        with self.allowance.request():
            await self._take_slot()

    async def _take_slot(self) -> None:
        await self._admission.slots.take()
        self._has_slot = True

    @contextlib.asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Raises DeadlineExceeded when the deadline comes, or BadRequest, 408, while the body is not whole."""
        try:
            async with self.deadline.kept():
                yield
        except DeadlineExceeded as late:
            if self._has_body:
                raise
            raise too_slow(str(late)) from None

    def leave(self) -> None:
        if self._has_slot:
            self._has_slot = False
            self._admission.slots.give_back()


class Admission:
    """Lets responses in, whatever their protocol: closing, deadline, a key's quota, a slot, metrics.

    `before` does it for HTTP requests, of which each has one response; of a connection with more of them the handler
    calls `admit` for each. `ingresses` share the slots, and what API keys may ask for.
    """

    def __init__(
        self,
        limits: Limits,
        ingresses: int,
        api: ApiConfig | None = None,
        clock: Clock = time.monotonic,
        metrics: IngressMetrics | None = None,
    ) -> None:
        self.limits = limits
        self.slots = AdmissionSlots(
            -(-limits.max_ongoing_requests // ingresses),
            -(-limits.max_queued_requests // ingresses),
            limits.max_wait_s,
            clock,
        )
        self._most_sessions, self._sessions = -(-limits.max_sessions // ingresses), 0
        self.closing = Closing()
        self._quotas = Quotas(api or ApiConfig(), ingresses, clock)
        self.uploads = Uploads(limits.max_upload_bytes)
        self._metrics = metrics or IngressMetrics()
        self._metrics.watch(self.slots, self.uploads)
        self._metrics.watch_sessions(lambda: self._sessions)

    @contextlib.asynccontextmanager
    async def admit(self, connection: HTTPConnection) -> AsyncIterator[AdmittedRequest]:
        """One response of a connection that may have several, such as a WebSocket's, by the headers of its handshake.

        Counts it with the status of what is raised inside. Raises BadRequest for one that is not let in, and
        DeadlineExceeded when its time is over; `error_answer` makes the client's answer of both.
        """
        state = connection.scope["state"]
        with (
            self._metrics.response(state["meter"].endpoint, state["request_id"]) as meter,
            self._entered(connection.headers, state["api_key"], meter) as admitted,
        ):
            async with admitted.deadline.kept():
                await admitted.without_body()
                yield admitted

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[Deadline]:
        """A place for a connection that stays open, and until when it may. Raises BadRequest, 429, without one."""
        if self._sessions >= self._most_sessions:
            raise BadRequest(
                f"{self._most_sessions} sessions are open, which is as many as may; connect again later.",
                code="too_many_sessions",
                status=429,
            )
        deadline = Deadline(self.limits.max_session_s, f"limits.max_session_s = {self.limits.max_session_s:g}")
        self.closing.enter(deadline)
        self._sessions += 1
        try:
            yield deadline
        finally:
            self._sessions -= 1
            self.closing.leave(deadline)

    def before(self, app: ASGIApp) -> ASGIApp:
        """ASGI middleware: each HTTP request but a probe gets its `AdmittedRequest`, as `request.state.admitted`.

        A request takes no slot until its body is whole, so a slow sender keeps no other request waiting.
        """

        async def entered(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) in PROBES:
                await app(scope, receive, send)
            else:
                await self._let_in(app, scope, receive, send)

        return entered

    async def _let_in(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        with contextlib.ExitStack() as leaving:
            try:
                enters = self._entered(Headers(scope=scope), state["api_key"], state["meter"])
                scope["state"] = {**state, "admitted": leaving.enter_context(enters)}
            except BadRequest as error:
                app = refusal(error.status, error.body(), error)
            await app(scope, receive, send)

    @contextlib.contextmanager
    def _entered(self, headers: Headers, api_key: bytes, meter: ResponseMeter) -> Iterator[AdmittedRequest]:
        """Raises BadRequest for headers that are none, and while the server closes."""
        check_headers(headers)
        deadline = deadline_of(headers, self.limits.request_timeout_s)
        self.closing.enter(deadline)
        admitted = AdmittedRequest(self, deadline, self._quotas.of(api_key), meter)
        try:
            yield admitted
        finally:
            admitted.leave()
            self.closing.leave(deadline)
