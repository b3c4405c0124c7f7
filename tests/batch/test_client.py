"""Which refusals a row waits out, which are its error, and which end the batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from omni_cluster.batch.client import MAX_DEATHS, RowClient
from omni_cluster.batch.errors import ApplicationLost, BatchError
from omni_cluster.batch.limits import BatchLimits
from omni_cluster.batch.sources import Application
from omni_cluster.openai_api.errors import error_body
from tests.batch.scripted import ANSWER, LIMITS, Scripted, row


def refused(status: int, code: str | None, **headers: str) -> Response:
    return JSONResponse(error_body(f"It is {code}.", status=status, code=code), status, headers)


@asynccontextmanager
async def client_of(app: Scripted, limits: BatchLimits = LIMITS) -> AsyncIterator[RowClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://scripted") as http:
        yield await RowClient.found(http, limits)


async def test_rows_are_answered_in_their_order_and_no_more_at_once_than_may_be() -> None:
    app = Scripted(lambda _: JSONResponse(ANSWER), together=LIMITS.rows_at_once)
    async with client_of(app) as client:
        answers = await client.answers([row(str(i)) for i in range(7 * LIMITS.rows_at_once)])
    assert [answer.id for answer in answers] == [str(i) for i in range(7 * LIMITS.rows_at_once)]
    assert {answer.text for answer in answers} == {"Hi"}
    assert app.most_at_once == LIMITS.rows_at_once


@pytest.mark.parametrize("status", [429, 502, 503])
async def test_a_row_waits_for_an_application_that_is_busy(status: int) -> None:
    busy = refused(status, "too_many_requests", **{"Retry-After": "0"})
    app = Scripted(lambda times: JSONResponse(ANSWER) if times == 3 else busy)
    async with client_of(app) as client:
        (answer,) = await client.answers([row("a")])
    assert answer.text == "Hi" and app.asked["a"] == 3


async def test_an_application_that_stays_busy_ends_the_batch_and_no_row_has_an_error() -> None:
    app = Scripted(lambda _: refused(503, "server_closing"))
    async with client_of(app, BatchLimits(patience_s=0.2)) as client:
        with pytest.raises(ApplicationLost, match=r"took no request for 0.2 s in all \(It is server_closing.\)"):
            await client.answers([row("a"), row("b")])


async def test_a_row_of_which_stages_die_gets_that_as_its_error_where_others_could_be_answered() -> None:
    app = Scripted(lambda _: refused(503, "stage_died", **{"Retry-After": "0"}))
    async with client_of(app) as client:
        (answer,) = await client.answers([row("a")])
    assert answer.error_code == "stage_died" and app.asked["a"] == MAX_DEATHS


WORK_S = LIMITS.patience_s + 10
NOW = {"Retry-After": "0"}
AT_WORK = {
    "stage died": refused(503, "stage_died", **NOW),
    "server closed": refused(503, "server_closing", **NOW),
    "server broke behind a proxy": refused(502, None, **NOW),
    "connection broke": httpx.RemoteProtocolError("the peer closed the connection"),
}
AWAY = {
    "full": refused(429, "too_many_requests", **NOW),
    "proxy's own refusal": refused(503, None, **NOW),
    "silent": httpx.ReadTimeout("no answer"),
    "not there": httpx.ConnectTimeout("no connection"),
}


def lost_after_work(lost: Response | Exception, times: int, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """Is full at first, then says `lost` so often, each time `WORK_S` after it was asked, and answers then."""
    loop = asyncio.get_running_loop()
    time, passed_s = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: time() + passed_s)

    def said(asked: int) -> Response:
        nonlocal passed_s
        if asked == 1:
            return refused(429, "too_many_requests", **NOW)
        if asked > times + 1:
            return JSONResponse(ANSWER)
        passed_s += WORK_S
        if isinstance(lost, Exception):
            raise lost
        return lost

    return Scripted(said)


@pytest.mark.parametrize("lost", AT_WORK.values(), ids=AT_WORK.keys())
async def test_work_on_a_row_that_is_lost_is_no_waiting(
    lost: Response | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_of(lost_after_work(lost, 1, monkeypatch)) as client:
        (answer,) = await client.answers([row("a")])
    assert answer.text == "Hi"


@pytest.mark.parametrize("lost", AWAY.values(), ids=AWAY.keys())
async def test_a_refusal_that_takes_long_and_silence_are_waiting(
    lost: Response | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_of(lost_after_work(lost, 1, monkeypatch)) as client:
        with pytest.raises(ApplicationLost):
            await client.answers([row("a")])


async def test_a_row_that_kills_stages_after_long_work_gets_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    app = lost_after_work(AT_WORK["stage died"], MAX_DEATHS, monkeypatch)
    async with client_of(app) as client:
        (answer,) = await client.answers([row("a")])
    assert answer.error_code == "stage_died" and app.asked["a"] == MAX_DEATHS + 1


async def test_stages_that_died_and_stay_away_end_the_batch() -> None:
    app = Scripted(lambda _: refused(503, "stage_died", **{"Retry-After": "0"}), is_ready=False)
    async with client_of(app, BatchLimits(patience_s=5)) as client:
        with pytest.raises(ApplicationLost, match="stage_died"):
            await client.answers([row("a")])
    assert app.asked["a"] > MAX_DEATHS


@pytest.mark.parametrize(("status", "code"), [(400, "invalid_value"), (413, None), (500, "server_error"), (504, None)])
async def test_what_the_application_says_of_a_row_is_the_row_s_error(status: int, code: str | None) -> None:
    async with client_of(Scripted(lambda _: refused(status, code))) as client:
        (answer,) = await client.answers([row("a")])
    assert (answer.error, answer.error_code) == (f"It is {code}.", code or f"http_{status}")
    assert answer.text is None


@pytest.mark.parametrize(("status", "text"), [(404, "Path '/v1' not found."), (500, "Internal Server Error")])
async def test_what_serve_says_in_place_of_the_application_is_waited_out(status: int, text: str) -> None:
    app = Scripted(lambda asked: PlainTextResponse(text, status) if asked == 1 else JSONResponse(ANSWER))
    async with client_of(app) as client:
        (answer,) = await client.answers([row("a")])
    assert (answer.text, app.asked["a"]) == ("Hi", 2)


async def test_a_key_that_is_refused_ends_the_batch() -> None:
    async with client_of(Scripted(lambda _: refused(401, "invalid_api_key"))) as client:
        with pytest.raises(BatchError, match="It is invalid_api_key"):
            await client.answers([row("a")])


async def test_an_application_that_is_not_there_ends_the_batch_before_a_row_is_asked() -> None:
    async with Application(url="http://127.0.0.1:9").opened(LIMITS) as http:
        with pytest.raises(ApplicationLost, match=r"took no request for 0\.1 s"):
            await RowClient.found(http, BatchLimits(patience_s=0.1))


@pytest.mark.parametrize("url", ["http://a:b", "127.0.0.1:8000", "ftp://host", "http://", ""])
async def test_a_url_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(BatchError, match=f"url is '{url}'.*use one such as http"):
        async with Application(url=url).opened(LIMITS):
            raise AssertionError("it was taken")


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(Application(url="http://a", api_key="secret"))
