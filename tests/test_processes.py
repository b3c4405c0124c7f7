"""Which process of a replica computes, and what is known of one that has ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from tests import processes
from tests.processes import command_line, engine_of, family, resident_bytes, running_after


@pytest.fixture
def parent() -> Iterator[int]:
    """A process with a child that is small, as a watchdog is."""
    process = subprocess.Popen(["sh", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process.pid
    for each in reversed(family(process.pid)):
        each.kill()
    process.communicate()


def test_a_watchdog_is_no_engine(parent: int) -> None:
    assert engine_of(parent) == parent


def test_the_engine_is_the_child_with_the_most_memory(monkeypatch: pytest.MonkeyPatch, parent: int) -> None:
    monkeypatch.setattr(processes, "LEAST_ENGINE_BYTES", 0)
    (child,) = psutil.Process(parent).children()
    assert engine_of(parent) == child.pid


def test_what_ended_runs_no_longer_and_what_sleeps_does(parent: int) -> None:
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie, as long as nobody asks how it ended
    sleeping, zombie = psutil.Process(parent), psutil.Process(ended.pid)
    assert running_after([sleeping, zombie], 0) == [sleeping]
    assert (command_line(zombie), resident_bytes(zombie)) == ("", 0)
    assert command_line(sleeping).startswith("sh -c") and resident_bytes(sleeping) > 0
    ended.wait()
    assert (command_line(zombie), resident_bytes(zombie)) == ("", 0)


def test_what_the_system_takes_away_runs_no_longer(monkeypatch: pytest.MonkeyPatch, parent: int) -> None:
    monkeypatch.setattr(psutil.Process, "status", lambda _: psutil.STATUS_DEAD)
    assert running_after([psutil.Process(parent)], 0) == []
