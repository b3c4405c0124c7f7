"""What plans are made of: cells as they are in benchmarks/results/, and figures within 15 % of those not fitted to."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from omni_cluster.models.registry import known_families
from omni_cluster.planning.curves import AnswerTime, Curve, OpenLoop
from omni_cluster.planning.measured import Cell, measured_of
from omni_cluster.types.errors import ConfigError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MEASURED = measured_of(known_families()[0])
NEAR = 0.15
CHECKED = [cell for cell in MEASURED.cells if cell.use == "check"]


def named(cell: Cell) -> str:
    return f"{cell.layout}-{cell.version}-{cell.arrivals}-{cell.level:g}-{cell.source[11:-5]}"


@pytest.mark.parametrize("cell", MEASURED.cells, ids=named)
def test_a_cell_is_what_its_source_says(cell: Cell) -> None:
    text = (RESULTS / cell.source).read_text()
    if cell.source.endswith(".txt"):
        (line,) = re.findall(rf"^open {cell.level:g}/s .*$", text, re.MULTILINE)
        for figure in (cell.answers_per_s, cell.first_audio_p50_s, cell.first_audio_p95_s):
            assert f"{figure:.3f}" in line
        assert f"{100 * (cell.without_gap or 0):g} %" in line
        return
    there = json.loads(text)
    if "open_loop" in there:
        (run,) = [
            each
            for each in there["open_loop"]
            if (each["policy"], each["rate_per_s"], each["neighbours"]) == ("steps", cell.level, False)
        ]
        assert run["first_audio_s"]["p95"] == cell.first_audio_p95_s
        assert round(run["without_gap"], 3) == cell.without_gap
        return
    (run,) = [each for each in there["cells"] if (each["arrivals"], each["level"]) == (cell.arrivals, cell.level)]
    assert round(run["requests_per_s"], 3) == cell.answers_per_s
    assert round(run["figures"]["first_audio_s"]["p50"], 3) == cell.first_audio_p50_s
    assert "gapless_share" not in run or round(run["gapless_share"], 3) == cell.without_gap


@pytest.mark.parametrize("cell", [cell for cell in CHECKED if cell.arrivals != "open"], ids=named)
def test_answers_a_second_of_one_and_two_cards(cell: Cell) -> None:
    expected = AnswerTime.fitted(MEASURED, cell.layout, cell.version).answers_per_s(cell.level)
    assert expected == pytest.approx(cell.answers_per_s, rel=NEAR)


@pytest.mark.parametrize("cell", [cell for cell in CHECKED if cell.arrivals == "open"], ids=named)
def test_first_audio_and_gaps_as_users_arrive(cell: Cell) -> None:
    expected = OpenLoop.measured(MEASURED, cell.layout, cell.version)
    assert expected.first_audio_p50_s.at(cell.level) == pytest.approx(cell.first_audio_p50_s, rel=NEAR)
    assert expected.first_audio_p95_s.at(cell.level) == pytest.approx(cell.first_audio_p95_s, rel=NEAR)
    assert expected.without_gap.at(cell.level) == pytest.approx(cell.without_gap, rel=NEAR)


def test_two_cards_are_only_checked_and_one_card_both() -> None:
    assert {cell.use for cell in MEASURED.cells if cell.layout == "split"} == {"check"}
    assert {cell.use for cell in MEASURED.cells if cell.layout == "together"} == {"fit", "check"}


def test_a_sound_card_alone_makes_what_it_was_measured_to_be_at_its_end_with() -> None:
    # At 9 a second, 62 % of the streams had no gap any more.
    assert 1 / AnswerTime.fitted(MEASURED, "apart").work_s == pytest.approx(9, rel=NEAR)


def test_a_prompt_between_two_measured_lengths() -> None:
    prompts = MEASURED.first_audio_by_prompt
    line = Curve(tuple(zip(prompts.prompt_tokens, prompts.seconds, strict=True)))
    assert line.at(650) == pytest.approx(0.237, rel=NEAR)  # "short" in the source


def test_a_curve_goes_on_and_is_asked_both_ways() -> None:
    falls, rises = Curve(((0, 1.0), (4, 1.0), (6, 0.5))), Curve(((0, 0.2), (4, 0.4)))
    assert [falls.at(x) for x in (-1, 2, 5, 7)] == [1.0, 1.0, 0.75, 0.25]
    assert [falls.most(limit, rises=False) for limit in (1.0, 0.75, 0.1)] == [4, 5, 6]
    assert [rises.most(limit, rises=True) for limit in (0.1, 0.3, 9)] == pytest.approx([0, 2, 4])
    assert falls.stretched(2).at(10) == 0.75


def test_a_family_that_was_not_measured_is_named() -> None:
    with pytest.raises(ConfigError, match="family is 'toy', of which nothing was measured"):
        measured_of("toy")
