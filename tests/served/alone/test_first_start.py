"""What an operator meets first: the default application on a terminal, from the command to Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from tests.processes import running_after
from tests.served.app import BASE_URL, PATIENCE_S, ROOT, STAGES, START_S
from tests.terminal import CTRL_C, WARNS, Terminal, on_terminal

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

BIN = Path(sys.executable).parent
KEPT = ("PATH", "HOME", "PYTHONPATH", "LANG", "TMPDIR")
"""Of the environment: the commands of the README set nothing else."""
TABLE = "┏┃┡│└"
HEAD = "what it does"
STOPPED = "omni-cluster: stopped by Ctrl-C."


def started(*command: str) -> AbstractContextManager[Terminal]:
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    return on_terminal(command, ROOT, environment)


def is_ready() -> bool:
    try:
        return httpx.get(f"{BASE_URL}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def stop(terminal: Terminal) -> int:
    """Presses Ctrl-C; one line more is shown, and nothing stays. Returns the exit status."""
    before = set(terminal.lines)
    terminal.press(CTRL_C)
    status = terminal.end(PATIENCE_S)
    more = [
        line.removeprefix("^C") for line in terminal.lines if line not in before and not line.startswith(tuple(TABLE))
    ]
    assert [line for line in more if line] == [STOPPED], "\n".join(terminal.lines)
    assert running_after(list(terminal.processes), PATIENCE_S) == []
    return status


def assert_no_warning(terminal: Terminal) -> None:
    assert [line for line in terminal.lines if WARNS.search(line)] == []


def test_serve_run_shows_one_table_and_no_warning_and_ctrl_c_ends_it_in_a_line() -> None:
    with started(str(BIN / "serve"), "run", "deployments:app") as terminal:
        terminal.until(lambda: terminal.written.count(HEAD) > 1, START_S)  # it is drawn again
        terminal.until(is_ready, START_S)
        terminal.until(lambda: all(re.search(rf"{name}\W+ready", "\n".join(terminal.lines)) for name in STAGES), 60)
        assert sum(HEAD in line for line in terminal.lines) == 1, "\n".join(terminal.lines)
        assert_no_warning(terminal)
        assert stop(terminal) == 128 + signal.SIGINT


def test_ctrl_c_ends_make_demo_in_a_line_while_it_starts() -> None:
    ready = f"{sys.prefix}/ready-cpu"  # what is installed is as it is
    with started("make", "-o", ready, f"VENV={sys.prefix}", "demo") as terminal:
        terminal.until(lambda: "imports its libraries" in terminal.written, START_S)
        assert stop(terminal) == -signal.SIGINT
        assert_no_warning(terminal)
        assert sum(HEAD in line for line in terminal.lines) == 1, "\n".join(terminal.lines)
