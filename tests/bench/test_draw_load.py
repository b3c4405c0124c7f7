"""The picture of open-loop load, drawn from the performance page's table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.draw_load import HEADING, PAGE, PICTURE, Point, draw, lines_of

PAGE_OF_TWO = f"""{HEADING}

Words.

| cards, layout | precision | prompt | rate | answered/s | TTFT | first audio | RTF p50 | no gap | underrun p99 |
|---|---|---|---|---|---|---|---|---|---|
| 1 H100 | shipped | 105 | **2.4/s** | 2.0 | 0.040 / 0.053 | 0.40 / 0.48 | 0.22 | 100 % | 0 |
| | | 650 | 4/s | 3.2 | 0.048 / 0.063 | 0.55 / RATE | 0.28 | 95 % | 0.051 |

| another | table |
|---|---|
| 1 | 2 |
"""


def test_the_page_shows_the_picture_of_its_table(tmp_path: Path) -> None:
    draw(lines_of(PAGE.read_text()), tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_text() == PICTURE.read_text(), "run python -m benchmarks.draw_load"
    assert f"../pictures/{PICTURE.name}" in PAGE.read_text()


def test_an_empty_cell_stands_for_the_one_above_it() -> None:
    assert lines_of(PAGE_OF_TWO.replace("RATE", "0.71")) == {
        ("1 H100", "shipped", "105"): [Point(2.4, 0.48, 100.0)],
        ("1 H100", "shipped", "650"): [Point(4.0, 0.71, 95.0)],
    }


def test_a_cell_without_a_number_is_told() -> None:
    with pytest.raises(ValueError, match=r"' fast' of the table in performance\.md has no number"):
        lines_of(PAGE_OF_TWO.replace("RATE", "fast"))
