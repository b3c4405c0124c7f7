"""The board in the repository is what its script makes."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

from deploy.grafana.draw_board import named
from deploy.grafana.make_board import BOARD, PANELS, sent, text


def test_the_board_is_made_from_the_definitions_as_they_are() -> None:
    assert BOARD.read_text() == text(), "run python deploy/grafana/make_board.py"


def test_every_panel_has_its_place_and_a_letter_for_each_query() -> None:
    made: list[dict[str, Any]] = json.loads(BOARD.read_text())["panels"]
    assert len({each["id"] for each in made}) == len(made)
    assert not [pair for pair in combinations(made, 2) if overlap(*(each["gridPos"] for each in pair))]
    graphs = [each for each in made if each["type"] == "timeseries"]
    assert [each["title"] for each in graphs] == [panel.title for panel in PANELS]
    assert [len(each["targets"]) for each in graphs] == [len(panel.queries) for panel in PANELS]


def overlap(a: dict[str, int], b: dict[str, int]) -> bool:
    return all(a[at] < b[at] + b[size] and b[at] < a[at] + a[size] for at, size in (("x", "w"), ("y", "h")))


def test_what_is_sent_has_no_variable_left() -> None:
    assert not [query for panel in PANELS for query in panel.queries if "$" in sent(query.expression)]


def test_a_legend_has_the_labels_of_its_series() -> None:
    assert named("{{stage}} {{replica}} p95", {"stage": "talker", "replica": "default#talker#abcdefgh"}) == (
        "talker abcdefgh p95"
    )
    assert named("", {}) == "all"
