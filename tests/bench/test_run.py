"""Cells of a run, and a server that cannot be asked."""

from __future__ import annotations

import base64
import dataclasses
import io
import itertools
import json
import struct
import wave
from pathlib import Path

import httpx
import pytest

from omni_cluster.bench.capacity import Search
from omni_cluster.bench.errors import BenchError
from omni_cluster.bench.http_client import AnswerParts, HttpClient, first_model
from omni_cluster.bench.load import Load, poisson_count
from omni_cluster.bench.mix import Mix
from omni_cluster.bench.record import Said
from omni_cluster.bench.result import Cell
from omni_cluster.bench.run import BenchOptions, CellPlan, measure, next_plan, plan, run_bench
from omni_cluster.bench.stats import cell_of
from tests.bench.records import CODES_PER_S, MODEL, SECOND, Server, Silent, gapless, record

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
    cells = plan(options(tmp_path, concurrency=(4,), rates_per_s=(0.02, 2.0), burst=True, seconds=90.0, warmup=0))
    in_90_s = poisson_count(2.0, 90.0, seed=0)
    assert cells == [CellPlan("burst", 4, 16, 0), CellPlan("open", 0.02, 8, 0), CellPlan("open", 2.0, in_90_s, 0)]
    in_60_s = poisson_count(2.0, 60.0, seed=0)
    assert plan(options(tmp_path, concurrency=(), rates_per_s=(2.0,))) == [CellPlan("open", 2.0, in_60_s, 1)]


def test_a_plan_of_conversations_has_whole_ones(tmp_path: Path) -> None:
    asked = options(tmp_path, concurrency=(1, 4), rates_per_s=(2.0,), warmup=0)
    users_in_60_s = poisson_count(2.0, 60.0, seed=0)
    by_turns = {turns: plan(dataclasses.replace(asked, load=Load(turns=turns))) for turns in (3, 5)}
    assert [cell.requests for cell in by_turns[3]] == [9, 24, 3 * users_in_60_s]
    assert [cell.requests for cell in by_turns[5]] == [10, 20, 5 * users_in_60_s]
    (few,) = plan(dataclasses.replace(options(tmp_path, concurrency=(4,), requests=7), load=Load(turns=5)))
    assert few.requests == 7


def test_a_search_tries_rates_until_it_has_found_one(tmp_path: Path) -> None:
    asked = options(tmp_path, concurrency=(), search=Search(between_per_s=(1.0, 64.0), precision=0.5), seconds=20.0)
    cells: list[Cell] = []
    while (cell_plan := next_plan(asked, cells)) is not None:
        assert (cell_plan.arrivals, cell_plan.warmup) == ("open", 1)
        assert cell_plan.requests == max(8, poisson_count(cell_plan.level, 20.0, seed=0))
        answer = gapless if cell_plan.level < 3.5 else record
        cells.append(cell_of("open", cell_plan.level, [answer(number) for number in range(3)], 1.0))
    assert [cell.level for cell in cells] == [1.0, 2.0, 4.0, 2.828]


def test_a_search_comes_after_the_cells_that_are_asked_for(tmp_path: Path) -> None:
    asked = options(tmp_path, concurrency=(4,), search=Search(between_per_s=(1.0, 1.0)))
    closed = cell_of("closed", 4, [record()], 1.0)
    found = cell_of("open", 1.0, [gapless(1)], 1.0)
    levels = [each and each.level for each in (next_plan(asked, []), next_plan(asked, [closed]))]
    assert levels == [4, 1.0] and next_plan(asked, [closed, found]) is None


@pytest.mark.parametrize(("arrivals", "at_once"), [("closed", 2), ("burst", 2), ("open", 6)])
async def test_a_cell_counts_its_requests_and_not_those_before(arrivals: str, at_once: int) -> None:
    server, numbers = Server(holds=arrivals == "open"), itertools.count()
    if arrivals == "open":
        server.may_end.set()
    cell, records = await measure(CellPlan(arrivals, 2, 6, 3), server.ask, numbers, Load())  # type: ignore[arg-type]
    assert sorted(each.number for each in records) == list(range(3, 9))
    assert sorted(server.asked) == list(range(9)) and next(numbers) == 9
    assert (cell.requests, cell.errors) == (6, 0)
    assert max(server.at_once[3:]) <= at_once


@pytest.mark.parametrize("arrivals", ["closed", "burst", "open"])
async def test_the_turns_of_a_user_come_one_after_another(arrivals: str) -> None:
    server, numbers, load = Silent(), itertools.count(), Load(turns=3, pause_s=0.001)
    cell, records = await measure(CellPlan(arrivals, 2, 8, 1), server.ask, numbers, load)  # type: ignore[arg-type]
    assert (cell.requests, cell.errors) == (8, 0)
    said = {number: [turn.number for turn in turns] for number, turns in zip(server.asked, server.said, strict=True)}
    # The first is not counted; the last user had no third turn.
    assert said == {0: [], 1: [], 2: [1], 3: [1, 2], 4: [], 5: [4], 6: [4, 5], 7: [], 8: [7]}
    assert sorted(each.number for each in records) == list(range(1, 9))


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
        answer = await HttpClient(http, MODEL, Load()).ask(5)
    assert answer.number == 5
    assert answer.error is not None and words in answer.error


async def test_a_later_turn_is_sent_behind_all_that_was_said() -> None:
    load, sent = Load(), []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content)["messages"])
        words = ["Yes, ", "all of it."]
        events = [json.dumps({"choices": [{"delta": {"content": word}}]}) for word in words]
        return httpx.Response(200, text="".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]))

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server") as http:
        record = await HttpClient(http, MODEL, load).ask(7, [Said(3, "No."), Said(4, "Why?")])
    roles = ["user", "assistant", "user", "assistant", "user"]
    content = [load.message(3), "No.", load.message(4), "Why?", load.message(7)]
    assert sent == [[{"role": role, "content": each} for role, each in zip(roles, content, strict=True)]]
    assert (record.earlier_turns, record.reply, record.error) == (2, "Yes, all of it.", None)


async def test_a_spoken_prompt_is_sent_as_sound() -> None:
    load = Load(mix=Mix(prompt_tokens=(20, 40), spoken_share=1.0, codes_per_s=CODES_PER_S))
    async with answering(200, "") as http:
        (message,) = HttpClient(http, MODEL, load).body(7)["messages"]
    (part,) = message["content"]
    assert (part["type"], part["input_audio"]["format"]) == ("input_audio", "wav")
    with wave.open(io.BytesIO(base64.b64decode(part["input_audio"]["data"]))) as sound:
        assert (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) == (1, 2, 16_000)
        assert sound.getnframes() == round(load.lengths(7).spoken_s * 16_000) > 0
        assert sound.readframes(sound.getnframes()) == load.speech(7).tobytes()  # type: ignore[union-attr]


USAGE = {"prompt_tokens": 7, "completion_tokens": 33, "completion_tokens_details": {"audio_tokens": 30}}


def test_a_stream_is_read_delta_by_delta() -> None:
    parts = AnswerParts()
    parts.add({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 0.5)
    parts.add({"choices": [{"delta": {"content": "Hi", "audio": {"transcript": "Hi"}}}]}, 1.0)
    parts.add({"choices": [{"delta": {"audio": {"data": "AAAAAAAA"}}}]}, 2.0)
    loud = base64.b64encode(struct.pack("<3h", 300, -400, 0)).decode()
    parts.add({"choices": [{"delta": {"audio": {"data": loud}}}]}, 2.2)
    parts.add(
        {"choices": [{"delta": {}}], "omni": {"stages": {"a": {"first_s": 1.0, "tokens": 3}}}, "usage": None}, 2.5
    )
    parts.add({"choices": [], "usage": USAGE}, 3.0)
    answer = parts.record(0, 3.5, SECOND)
    assert (answer.text_s, [(a.at_s, a.samples) for a in answer.audio]) == ((1.0,), [(2.0, 3), (2.2, 3)])
    assert answer.audible_at == 4
    assert (answer.prompt_tokens, answer.text_tokens, answer.codec_tokens) == (7, 3, 30)
    assert answer.stages == {"a": {"first_s": 1.0}}
