"""Files and tables of a result."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from omni_cluster.bench.capacity import Search, Tried
from omni_cluster.bench.compare import difference_table, differences, run_compare
from omni_cluster.bench.errors import BenchError
from omni_cluster.bench.load import Load
from omni_cluster.bench.machine import this_machine
from omni_cluster.bench.mix import Mix
from omni_cluster.bench.plot import write_plot
from omni_cluster.bench.result import Result, read_result, write_requests, write_result
from omni_cluster.bench.stats import cell_of
from omni_cluster.bench.table import print_result
from tests.bench.records import CODES_PER_S, record, result, two_cells

OLD_RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-22-h200-650-tokens-rate.json"


def told(written: Result) -> str:
    file = io.StringIO()
    print_result(written, Console(file=file, width=160))
    return file.getvalue()


def printed(*things: object) -> str:
    file = io.StringIO()
    Console(file=file, width=160).print(*things)
    return file.getvalue()


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = Search().found([Tried(1.0, 1.0)])
    written = dataclasses.replace(result(two_cells(), load=Load(mix=Mix(codes_per_s=CODES_PER_S))), capacity=found)
    path = write_result(written, tmp_path)
    assert read_result(path) == written
    assert json.loads(path.read_text())["cells"][0]["figures"]["jct_s"]["p50"] == 4.0


def test_what_is_no_result_is_told_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"none\.json cannot be read"):
        read_result(tmp_path / "none.json")
    (tmp_path / "other.json").write_text('{"cells": 5}')
    with pytest.raises(BenchError, match="is no result of this command"):
        read_result(tmp_path / "other.json")


def test_every_request_is_a_line(tmp_path: Path) -> None:
    write_requests("closed 1", [record(0)], Load(), tmp_path)
    write_requests("closed 4", [record(1), record(2, error="no.")], Load(mix=Mix(codes_per_s=CODES_PER_S)), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [(line["cell"], line["request"]["number"]) for line in lines] == [
        ("closed 1", 0), ("closed 4", 1), ("closed 4", 2),
    ]  # fmt: skip
    assert lines[0]["request"]["audio"][1] == {"at_s": 3.0, "samples": 24_000}
    assert lines[2]["request"]["error"] == "no."
    fixed = {"prompt_tokens": 100, "text_tokens": 64, "codec_tokens": 512, "spoken_s": 0.0}
    assert lines[0]["asked"] == fixed
    assert [line["asked"] for line in lines[1:]] == [
        dataclasses.asdict(Mix(codes_per_s=CODES_PER_S).lengths(0, place)) for place in (1, 2)
    ]


@pytest.mark.parametrize("cells", [two_cells(), two_cells()[:1], ()], ids=["two cells", "one cell", "no cell"])
def test_the_plot_is_a_picture(tmp_path: Path, cells: tuple) -> None:  # type: ignore[type-arg]
    path = write_plot(result(cells, target="http://[::1]:8000/$_x$"), tmp_path)
    assert path == tmp_path / "result.png"
    with Image.open(path) as image:
        assert image.format == "PNG" and image.width > 1000
        assert len(image.convert("RGB").getcolors(1 << 24)) > 2


def test_prompts_that_no_server_counted_are_words() -> None:
    uncounted = cell_of("closed", 1, [dataclasses.replace(record(0), prompt_tokens=0)], 1.0)
    assert "model m, 100 words, 64 text tokens" in told(result((uncounted,)))


def test_the_tables_name_loads_stages_and_the_first_error() -> None:
    text = told(result(two_cells(), target="http://[::1]:8000"))
    asked = "100 words (median prompt: 10 tokens), 64 text tokens, 512 codec tokens a request, streamed"
    assert f"http://[::1]:8000, model m, {asked}" in text
    assert "4.000 / 4.000 / 4.000" in text and "0.100 / 0.100 / 0.100" in text
    assert "open 0.5/s: 1 of 5 requests failed, the first: no." in text
    assert sum("second" in line and "1.000 / 1.000 / 1.000" in line for line in text.splitlines()) == 2
    assert "wait" in text
    assert "1.500 / 1.500 / 1.500" in text and "0.0 %" in text


def test_a_mix_and_a_capacity_are_told() -> None:
    search = Search(share=0.95)
    found = search.found([Tried(4.0, 0.97), Tried(8.0, 0.5)])
    text = told(dataclasses.replace(result(two_cells(), load=Load(mix=Mix(spoken_share=0.25))), capacity=found))
    assert "prompts of 20 to 2000 tokens, 25 % of them spoken, 2 to 20 s of sound, streamed" in text
    assert "capacity: 4/s with 95 % of the streams without a gap; 8/s failed; 2 cells were too few" in text


def test_conversations_are_told_and_compared_with_conversations_alone() -> None:
    turns = [record(0), dataclasses.replace(record(1, slower=2.0), earlier_turns=1)]
    talked = result([cell_of("open", 1, turns, 9.0)], load=Load(turns=2))
    text = told(talked)
    assert "512 codec tokens a request, streamed, conversations of 2 turns" in text
    assert "0.100 / 0.100 / 0.100 │ 0.200 / 0.200 / 0.200" in text and "later turns" in text
    assert "conversations" not in told(result(two_cells())) and "later turns" not in told(result(two_cells()))
    with pytest.raises(BenchError, match="turns is 2 in A and 1 in B; compare runs of one load"):
        differences(talked, result([cell_of("open", 1, turns, 9.0)]))


def test_a_result_of_before_there_was_a_share_without_gaps_is_read_and_compared() -> None:
    old = read_result(OLD_RESULT)
    assert [cell.gapless_share for cell in old.cells] == [None, None] and old.load.mix is None and old.capacity is None
    assert {difference.more for difference in differences(old, old)} == {0.0}
    table = printed(difference_table(old, old))
    assert "first audible" not in table and "stall p99" in table
    assert "prompts of" not in told(old)


def test_a_comparison_is_cell_by_cell() -> None:
    slow, fast = result(two_cells(1.5), target="http://[::1]:1"), result(two_cells()[:1])
    found = {(d.cell, d.figure): d for d in differences(slow, fast)}
    assert {cell for cell, _ in found} == {"closed 2"}
    text = found["closed 2", "first text p50"]
    assert (text.unit, text.a, text.b, text.more) == ("ms", *map(pytest.approx, (150.0, 100.0, 50.0)))
    assert text.more_percent == pytest.approx(50.0)
    assert found["closed 2", "requests"].more_percent == pytest.approx(-100 / 3)
    assert "+50.0" in printed(difference_table(slow, fast)) and "http://[::1]:1" in printed(
        difference_table(slow, fast)
    )


def test_runs_that_have_nothing_in_common_are_not_compared() -> None:
    with pytest.raises(BenchError, match="text_tokens is 64 in A and 8 in B"):
        differences(result(two_cells()), result(two_cells(), load=Load(text_tokens=8)))
    with pytest.raises(BenchError, match="mix is Mix"):
        differences(result(two_cells(), load=Load(mix=Mix(codes_per_s=CODES_PER_S))), result(two_cells()))
    with pytest.raises(BenchError, match=r"A has the loads closed 2 and B open 0\.5/s"):
        differences(result(two_cells()[:1]), result(two_cells()[1:]))


def test_the_comparison_of_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name, slower in (("a", 2.0), ("b", 1.0)):
        (tmp_path / name).mkdir()
        paths.append(write_result(result(two_cells(slower)), tmp_path / name))
    run_compare(*paths)
    text = capsys.readouterr().out
    assert "+4000.000" in text and "+100.0" in text
    assert text.replace("\n", "").count("1 of 5 requests of open 0.5/s failed") == 2


def test_the_machine_says_whose_it_is() -> None:
    machine = this_machine("the client")
    assert machine.role == "the client" and machine.cpus > 0
    assert {"ray", "torch"} <= set(machine.versions)
    assert bool(machine.cards) == (machine.driver is not None)
