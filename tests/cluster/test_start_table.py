"""What is shown of a start, on a terminal and elsewhere."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from rich.console import Console

from omni_cluster.cluster import start_table as module
from omni_cluster.cluster.start_table import StartTable, start_table
from omni_cluster.cluster.starting import READY
from tests.terminal import shown

STARTING = {"thinker": "imports its libraries", "talker": "reads the checkpoint"}


def terminal(file: io.StringIO) -> Console:
    return Console(file=file, width=100, force_terminal=True, highlight=False)


def test_elsewhere_a_line_is_said_for_each_change_only() -> None:
    printed = io.StringIO()
    with start_table(Console(file=printed, width=20)) as table:
        for doing in (STARTING, STARTING, STARTING | {"talker": READY}):
            table.update(doing)
    said = [line.split(" s  ")[1] for line in printed.getvalue().splitlines()]
    assert said == ["thinker: imports its libraries", "talker: reads the checkpoint", "talker: ready"]


def test_a_row_has_its_state_since_when_and_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    table, printed = StartTable(), io.StringIO()
    now_s = 102.0
    table.update(STARTING)
    now_s = 107.5
    table.update({"talker": READY})
    terminal(printed).print(table)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.getvalue().splitlines() if "│" in line]
    assert rows == [
        ["thinker", "starting", "2.0", "5.5", "imports its libraries"],
        ["talker", "ready", "7.5", "", "serves"],
    ]


def test_a_terminal_has_one_table_and_what_is_printed_meanwhile_above_it() -> None:
    printed = io.StringIO()
    console = terminal(printed)
    with start_table(console) as table:
        table.update(STARTING)
        console.print("a line of a log")
        table.update({"thinker": READY, "talker": READY})
    lines = shown(printed.getvalue())
    assert lines[0] == "a line of a log"
    assert sum("what it does" in line for line in lines) == 1
    assert not any("imports its libraries" in line for line in lines)


def test_a_start_is_over_when_all_are_ready() -> None:
    table = StartTable()
    assert not table.is_ready
    table.update(STARTING)
    table.update({"thinker": READY})
    assert not table.is_ready
    table.update({"talker": READY})
    assert table.is_ready


def test_what_is_logged_to_the_terminal_stands_above_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    printed, logger = io.StringIO(), logging.getLogger("tests.start_table")
    monkeypatch.setattr(sys, "stderr", printed)
    handler = logging.StreamHandler()
    monkeypatch.setattr(logger, "handlers", [handler])
    with start_table(terminal(printed)) as table:
        table.update(STARTING)
        logger.warning("a line of a log")
        assert handler.stream is not printed
    assert handler.stream is printed
    lines = shown(printed.getvalue())
    assert lines.count("a line of a log") == 1
    assert sum("what it does" in line for line in lines) == 1
