"""Cells of a run, and a server that cannot be asked."""

from __future__ import annotations

import itertools
from pathlib import Path

import httpx
import pytest

from omni_cluster.bench.errors import BenchError
from omni_cluster.bench.http_client import AnswerParts, HttpClient, first_model
from omni_cluster.bench.load import Load
from omni_cluster.bench.run import BenchOptions, CellPlan, measure, plan, run_bench
from tests.bench.records import Server

CLOSED_PORT = "http://127.0.0.1:9"


def options(tmp_path: Path, **changes: object) -> BenchOptions:
    return BenchOptions(load=Load(), out=tmp_path / "out", command="bench", url=CLOSED_PORT, **changes)  # type: ignore[arg-type]


def test_the_default_plan(tmp_path: Path) -> None:
    cells = plan(options(tmp_path))
    assert [cell.level for cell in cells] == [1, 4, 16, 32, 64]
    assert [cell.requests for cell in cells] == [8, 16, 64, 128, 256]
    assert [cell.warmup for cell in cells] == [1, 4, 16, 32, 64]
    assert {cell.arrivals for cell in cells} == {"closed"}


def test_a_plan_of_bursts_and_rates(tmp_path: Path) -> None:
    cells = plan(options(tmp_path, concurrency=(4,), rates_per_s=(0.1, 2.0), burst=True, warmup=0))
    assert cells == [CellPlan("burst", 4, 16, 0), CellPlan("open", 0.1, 8, 0), CellPlan("open", 2.0, 60, 0)]


@pytest.mark.parametrize(("arrivals", "at_once"), [("closed", 2), ("burst", 2), ("open", 6)])
async def test_a_cell_counts_its_requests_and_not_those_before(arrivals: str, at_once: int) -> None:
    server, numbers = Server(holds=arrivals == "open"), itertools.count()
    if arrivals == "open":
        server.may_end.set()
    cell, records = await measure(CellPlan(arrivals, 2, 6, 3), server.ask, numbers, seed=0)  # type: ignore[arg-type]
    assert sorted(record.number for record in records) == list(range(3, 9))
    assert sorted(server.asked) == list(range(9)) and next(numbers) == 9
    assert (cell.requests, cell.errors) == (6, 0)
    assert max(server.at_once[3:]) <= at_once


def test_a_server_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"no server answers at http://127\.0\.0\.1:9 .*--url"):
        run_bench(options(tmp_path))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://[::"])
def test_a_url_that_is_none_is_one_sentence(tmp_path: Path, url: str) -> None:
    with pytest.raises(BenchError, match="--url"):
        run_bench(BenchOptions(load=Load(), out=tmp_path / "out", command="bench", url=url))


def test_an_earlier_result_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "result.json").write_text("kept")
    with pytest.raises(BenchError, match="earlier run"):
        run_bench(options(tmp_path))
    assert (tmp_path / "out" / "result.json").read_text() == "kept"


def answering(status: int, content: str) -> httpx.AsyncClient:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=content))
    return httpx.AsyncClient(transport=transport, base_url="http://server")


@pytest.mark.parametrize(
    ("status", "content", "words"),
    [(404, "", "404"), (200, "<html>", "lists no model"), (200, '{"data": []}', "lists no model")],
)
async def test_what_is_no_api_server_is_one_sentence(status: int, content: str, words: str) -> None:
    async with answering(status, content) as http:
        with pytest.raises(BenchError, match=words):
            await first_model(http, "http://server")


@pytest.mark.parametrize(
    ("status", "content", "words"),
    [
        (400, '{"error": {"message": "too long."}}', "too long."),
        (429, "busy", "429"),
        (200, 'data: {"error": {"message": "broke."}}\n\n', "broke."),
        (200, 'data: {"choices": []}\n\n', "without [DONE]"),
        (200, "data: nonsense\n\n", "nonsense"),
    ],
)
async def test_a_request_that_fails_is_a_record_with_its_sentence(status: int, content: str, words: str) -> None:
    async with answering(status, content) as http:
        record = await HttpClient(http, "m", Load()).ask(5)
    assert record.number == 5
    assert record.error is not None and words in record.error


def test_a_stream_is_read_delta_by_delta() -> None:
    parts = AnswerParts()
    parts.add({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 0.5)
    parts.add({"choices": [{"delta": {"content": "Hi", "audio": {"transcript": "Hi"}}}]}, 1.0)
    parts.add({"choices": [{"delta": {"audio": {"data": "AAAAAAAA"}}}]}, 2.0)
    parts.add(
        {"choices": [{"delta": {}}], "omni": {"stages": {"a": {"first_s": 1.0, "tokens": 3}}}, "usage": None}, 2.5
    )
    parts.add({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}, 3.0)
    record = parts.record(0, 3.5)
    assert (record.text_s, [(a.at_s, a.samples) for a in record.audio]) == ((1.0,), [(2.0, 3)])
    assert (record.prompt_tokens, record.text_tokens, record.codec_tokens) == (7, 3, 0)
    assert record.stages == {"a": {"first_s": 1.0}}
