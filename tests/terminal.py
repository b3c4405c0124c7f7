"""A command on a terminal of its own, as a user has it: what the screen shows, and Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ROWS, COLUMNS = 2000, 200
"""A window that nothing is scrolled out of."""
LOOK_S = 0.2
CTRL_C = b"\x03"
WARNS = re.compile(r"WARN|Warning|deprecated|\bW\d{4}\b|Traceback")
"""What a line has that a user is not to see."""
_PARTS = re.compile(r"\x1b\[(?P<count>\d*)(?P<code>[AKm])|\x1b\[\?\d+[hl]|(?P<text>[^\x1b]+)|\x1b")


class Terminal:
    """A command that runs on a terminal. `processes`: all that were seen below it."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._controller, terminal = os.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, "TERM": "xterm"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(terminal)
        self.processes: set[psutil.Process] = set()
        self._written = bytearray()
        self._reads = threading.Thread(target=self._read, daemon=True)
        self._reads.start()

    def _read(self) -> None:
        with suppress(OSError):  # what a terminal that nothing writes to any more gives
            while part := os.read(self._controller, 65_536):
                self._written += part

    @property
    def written(self) -> str:
        return self._written.decode(errors="replace")

    @property
    def lines(self) -> list[str]:
        """What the screen shows."""
        return shown(self.written)

    def press(self, keys: bytes) -> None:
        os.write(self._controller, keys)

    def until(self, condition: Callable[[], bool], patience_s: float) -> None:
        """Waits for what must come while the command runs."""
        ends_s = time.monotonic() + patience_s
        while not condition():
            self._look()
            assert self.process.poll() is None, "\n".join(self.lines)
            assert time.monotonic() < ends_s, "\n".join(self.lines)
            time.sleep(LOOK_S)

    def end(self, patience_s: float) -> int:
        """Waits for the end of the command, and for all that it has written; its exit status."""
        ends_s = time.monotonic() + patience_s
        while self.process.poll() is None and time.monotonic() < ends_s:
            self._look()
            time.sleep(LOOK_S)
        status = self.process.wait(LOOK_S)
        self._reads.join(LOOK_S)
        return status

    def _look(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.processes |= set(psutil.Process(self.process.pid).children(recursive=True))

    def close(self) -> None:
        """Ends what still runs."""
        self._look()
        for process in (self.process, *self.processes):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        os.close(self._controller)


def _take_terminal() -> None:
    """As a shell begins a command: of tests in the background all children would ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def on_terminal(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[Terminal]:
    terminal = Terminal(command, folder, environment)
    try:
        yield terminal
    finally:
        terminal.close()


def shown(written: str) -> list[str]:
    """The lines of a screen that this was written to: with what moves up and what erases a line, colours left out."""
    lines, row, column = [""], 0, 0
    for part in _PARTS.finditer(written):
        if part["code"] == "A":
            row = max(0, row - int(part["count"] or 1))
        elif part["code"] == "K":
            lines[row] = "" if part["count"] == "2" else lines[row][:column]
        for character in part["text"] or "":
            if character == "\n":
                row, column = row + 1, column
                lines += [""] * (row + 1 - len(lines))
            elif character == "\r":
                column = 0
            else:
                lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
                column += 1
    return [line.rstrip() for line in lines]
