"""The process beside a replica: it ends a replica that hangs, and what a replica started when that is gone.

A script of its own, without the package and its libraries: it is there in milliseconds, and needs nothing that hangs.
Standard input has the replica's beats: a byte now and then, GOOD_BYE before an orderly end, the end of file when it is
gone. Arguments: its process id, and the seconds that it may be silent, from its first beat on.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

GOOD_BYE = b"q"
TICK_S = 1.0
STOPPED_S = 8.0
"""How long a process of the replica may be stopped, as by SIGSTOP, which no process ever is by itself."""


class Process(NamedTuple):
    """A process that /proc knows: its number may be another's by now, number and start may not."""

    pid: int
    started: str


class Watch:
    """What is known of a replica and of all that it started, itself and its resource tracker left out."""

    def __init__(self, pid: int, patience_s: float) -> None:
        self._pid = pid
        self._patience_s = patience_s
        self._started: set[Process] = set()
        self._silent_s: float | None = None
        self._stopped_s = 0.0

    def run(self, beats: int) -> None:
        """Until the replica is gone or says good-bye."""
        while True:
            began_s = time.monotonic()
            beat = os.read(beats, 4096) if select.select([beats], [], [], TICK_S)[0] else None
            if beat is not None and GOOD_BYE in beat:
                return
            if beat == b"":
                self._end_started()
                return
            # What is late is late by this process's own time, which stands still when the whole host does.
            self._look(is_silent=beat is None, lapse_s=min(time.monotonic() - began_s, 2 * TICK_S))

    def _look(self, is_silent: bool, lapse_s: float) -> None:
        self._started = {process for pid in descendants(self._pid) if (process := identified(pid)) is not None}
        if not is_silent:
            self._silent_s = 0.0
        elif self._silent_s is not None:
            self._silent_s += lapse_s
        self._stopped_s = self._stopped_s + lapse_s if self._is_stopped() else 0.0
        if self._stopped_s > STOPPED_S:
            self._end_all(f"it or an engine of it has been stopped for {self._stopped_s:.0f} s")
        elif self._silent_s is not None and self._silent_s > self._patience_s:
            self._end_all(f"it has given no sign of life for {self._silent_s:.0f} s")

    def _is_stopped(self) -> bool:
        return any(state(pid) == "T" for pid in (self._pid, *(process.pid for process in self._started)))

    def _end_all(self, reason: str) -> None:
        print(f"watchdog: the replica with process id {self._pid} is ended: {reason}.", file=sys.stderr, flush=True)
        kill(self._pid)
        self._end_started()

    def _end_started(self) -> None:
        for process in self._started:
            if identified(process.pid) == process:
                kill(process.pid)


def descendants(pid: int) -> Iterator[int]:
    for child in children(pid):
        if child != os.getpid() and not is_resource_tracker(child):
            yield child
            yield from descendants(child)


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, text(f"/proc/{pid}/task/{thread}/children").split())
    return found


def is_resource_tracker(pid: int) -> bool:
    """Of Python's multiprocessing: it ends by itself once it has freed what the others shared."""
    return "multiprocessing.resource_tracker" in text(f"/proc/{pid}/cmdline")


def identified(pid: int) -> Process | None:
    fields = stat(pid)
    return Process(pid, fields[19]) if fields else None


def state(pid: int) -> str:
    fields = stat(pid)
    return fields[0] if fields else ""


def stat(pid: int) -> list[str]:
    """The fields of a process from its state on; [] when it is gone."""
    return text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def text(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    Watch(int(sys.argv[1]), float(sys.argv[2])).run(sys.stdin.fileno())
