"""The terminal of the tests: what its screen shows, and what its keys do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.terminal import CTRL_C, on_terminal, shown

PATIENCE_S = 60
WAITS = "import sys,time\nprint(sys.stdout.isatty())\ntry:\n time.sleep(600)\nexcept KeyboardInterrupt: sys.exit(7)"


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        ("one\r\ntwo", ["one", "two"]),
        ("three\rone", ["oneee"]),
        ("one\r\ntwo\r\x1b[2K\x1b[1A\x1b[2Kthree", ["three", ""]),
        ("\x1b[?25l\x1b[1mone\x1b[0m\x1b[?25h", ["one"]),
        ("three\r\x1b[Kone", ["one"]),
    ],
    ids=["lines", "over it", "drawn again", "colours", "erased"],
)
def test_the_screen_shows_what_is_left(written: str, lines: list[str]) -> None:
    assert shown(written) == lines


def test_a_command_has_a_terminal_and_ctrl_c_reaches_it(tmp_path: Path) -> None:
    with on_terminal([sys.executable, "-c", WAITS], tmp_path, os.environ) as terminal:
        terminal.until(lambda: terminal.lines[0] == "True", PATIENCE_S)
        terminal.press(CTRL_C)
        assert terminal.end(PATIENCE_S) == 7
        assert terminal.lines[1] == "^C"
