"""Asks the HTTP API for the answers of rows, whatever carries it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from omni_cluster.api_client import BadAnswer, Refused, body_of, refusal
from omni_cluster.batch.answer import Answer
from omni_cluster.batch.errors import ApplicationLost, BadRow, BatchError
from omni_cluster.batch.limits import BatchLimits
from omni_cluster.batch.row import Row, content_of, id_of
from omni_cluster.server.closing import CLOSING

JSON: Final = {"Content-Type": "application/json"}
BUSY: Final = (429, 502, 503)
OF_SERVE: Final = (404, 500)
"""Serve's proxy says these in plain text: of an application that is not there yet, and of an ingress that was lost."""
FORBIDDEN: Final = (401, 403)
DIED: Final = "stage_died"
MAX_DEATHS: Final = 3
"""How often a stage may die of a row before that is the row's error: it may be what kills it."""
MIN_WAIT_S: Final = 0.1
FIRST_WAIT_S: Final = 0.5
MAX_WAIT_S: Final = 30.0
_NEVER_AT_WORK: Final = (httpx.ConnectError, httpx.TimeoutException)
"""Of errors, those that mean no work on the request. `timeout_s` of silence is so long that the server is lost."""


class NotNow(Exception):
    """The application cannot take a request now, or lost it. `retry_after_s`: its own word, or None.

    `was_at_work`: it may have been at work on the request until then.
    """

    def __init__(
        self, reason: str, *, code: str | None = None, retry_after_s: float | None = None, was_at_work: bool = False
    ) -> None:
        super().__init__(reason)
        self.code = code
        self.retry_after_s = retry_after_s
        self.was_at_work = was_at_work


@dataclass
class Patience:
    """How long one row has still to wait for the application, counted from its first refusal, work on it left out."""

    limit_s: float
    ends_s: float | None = None
    next_s: float = FIRST_WAIT_S
    deaths: int = 0

    def leave_out(self, worked_s: float) -> None:
        """The application was at work on the row for so long, which is no waiting."""
        if self.ends_s is not None:
            self.ends_s += worked_s

    async def wait(self, refused: NotNow) -> None:
        """Returns when the row may be sent again. Raises ApplicationLost."""
        now_s = _now_s()
        if self.ends_s is None:
            self.ends_s = now_s + self.limit_s
        asked_s = self.next_s if refused.retry_after_s is None else refused.retry_after_s
        wait_s = min(max(asked_s, MIN_WAIT_S), MAX_WAIT_S)
        if now_s + wait_s > self.ends_s:
            raise ApplicationLost(
                f"the application took no request for {self.limit_s:g} s in all ({refused}); "
                f"start the batch again once it does."
            )
        self.next_s = min(2 * self.next_s, MAX_WAIT_S)
        await asyncio.sleep(wait_s)


class RowClient:
    """Answers rows, at most `limits.rows_at_once` at a time. `http` has the application's address and key."""

    def __init__(self, http: httpx.AsyncClient, limits: BatchLimits, model: str) -> None:
        self._http = http
        self._limits = limits
        self._model = model
        self._places = asyncio.Semaphore(limits.rows_at_once)

    @classmethod
    async def found(cls, http: httpx.AsyncClient, limits: BatchLimits) -> RowClient:
        """Asks for the application's first model. Raises ApplicationLost, and BatchError where there is no such API."""
        patience = Patience(limits.patience_s)
        while True:
            try:
                return cls(http, limits, await _first_model(http))
            except NotNow as refused:
                await patience.wait(refused)

    async def answers(self, rows: Sequence[Row]) -> list[Answer]:
        """In the order of the rows. Raises ApplicationLost and BatchError, and then ends what still runs."""
        tasks = [asyncio.create_task(self._in_place(row)) for row in rows]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _in_place(self, row: Row) -> Answer:
        row_id = id_of(row)
        async with self._places:
            try:
                content = await asyncio.to_thread(content_of, row, self._model, self._limits.max_media_bytes)
            except BadRow as bad:
                return Answer(id=row_id, error=str(bad), error_code=bad.code)
            return await self._answered(row_id, content)

    async def _answered(self, row_id: str, content: bytes) -> Answer:
        patience = Patience(self._limits.patience_s)
        while True:
            sent_s = _now_s()
            try:
                return _answer(row_id, await sent(self._http, content))
            except NotNow as refused:
                if refused.was_at_work:
                    patience.leave_out(_now_s() - sent_s)
                patience.deaths += refused.code == DIED
                if patience.deaths >= MAX_DEATHS and await self._is_ready():
                    return Answer(id=row_id, error=str(refused), error_code=DIED)
                await patience.wait(refused)

    async def _is_ready(self) -> bool:
        """Whether all stages can serve: where they cannot, no row is to blame."""
        with contextlib.suppress(httpx.TransportError):
            return (await self._http.get("/ready")).status_code == httpx.codes.OK
        return False


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _first_model(http: httpx.AsyncClient) -> str:
    response = await _heard(http.get("/v1/models"))
    _check_passing(response)
    try:
        return str(body_of(response.content)["data"][0]["id"])
    except (BadAnswer, LookupError, TypeError):
        raise BatchError(
            f"{response.url} answered {response.status_code} and names no model; give the address of an application."
        ) from None


async def sent(http: httpx.AsyncClient, content: bytes) -> httpx.Response:
    """The application's last word on a request. Raises NotNow, and BatchError for a key that it refuses."""
    response = await _heard(http.post("/v1/chat/completions", content=content, headers=JSON))
    _check_passing(response)
    if response.status_code in OF_SERVE:
        said = refusal(response.status_code, response.content)
        if not isinstance(said, Refused):
            raise NotNow(str(said), was_at_work=response.status_code != httpx.codes.NOT_FOUND)
    return response


async def _heard(asked: Any) -> httpx.Response:
    try:
        return await asked
    except httpx.TransportError as error:
        was_at_work = not isinstance(error, _NEVER_AT_WORK)
        raise NotNow(str(error) or type(error).__name__, was_at_work=was_at_work) from None


def _check_passing(response: httpx.Response) -> None:
    """Raises what is no row's doing."""
    if response.status_code in FORBIDDEN:
        raise BatchError(str(refusal(response.status_code, response.content)))
    if response.status_code in BUSY:
        said = refusal(response.status_code, response.content)
        code = _code(said)
        # A proxy says 502 where the application's own connection broke.
        was_at_work = response.status_code == httpx.codes.BAD_GATEWAY or code in (DIED, CLOSING)
        raise NotNow(str(said), code=code, retry_after_s=_retry_after_s(response), was_at_work=was_at_work)


def _answer(row_id: str, response: httpx.Response) -> Answer:
    if response.status_code != httpx.codes.OK:
        said = refusal(response.status_code, response.content)
        return Answer(id=row_id, error=str(said), error_code=_code(said) or f"http_{response.status_code}")
    try:
        return Answer.of(row_id, body_of(response.content))
    except (BadAnswer, LookupError, ValueError) as error:
        raise NotNow(f"the answer of {row_id!r} is none: {error}") from None


def _code(said: BadAnswer) -> str | None:
    return said.code if isinstance(said, Refused) else None


def _retry_after_s(response: httpx.Response) -> float | None:
    """Of the header's seconds; a date is left to the client's own waits."""
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else None
