"""What is seen of a start: one table on a terminal, redrawn in place, or a line for each change elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from omni_cluster.cluster.starting import READY

DRAWINGS_PER_S = 4


@dataclass(frozen=True, slots=True)
class Doing:
    """What a part of the cluster does; `since_s` counts from the start."""

    what: str
    since_s: float

    @property
    def state(self) -> str:
        return READY if self.what == READY else "starting"


class StartTable:
    """The parts of a cluster that starts, a row each. `say` gets each change as a line."""

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say
        self._began_s = time.monotonic()
        self._rows: dict[str, Doing] = {}

    def update(self, doing: Mapping[str, str]) -> None:
        """Takes what each part does now, by its name; READY is one that serves."""
        for name, what in doing.items():
            if name not in self._rows or self._rows[name].what != what:
                self._change(name, what)

    def _change(self, name: str, what: str) -> None:
        self._rows[name] = Doing(what, self.elapsed_s)
        if self._say is not None:
            self._say(f"{self.elapsed_s:6.1f} s  {name}: {what}")

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def is_ready(self) -> bool:
        return bool(self._rows) and all(row.what == READY for row in self._rows.values())

    def __rich__(self) -> Table:
        """`since`: seconds from the start until this began; `for`: how long it has taken until now."""
        table = Table("part", "state", "since, s", "for, s", "what it does")
        for name, row in self._rows.items():
            starts = row.what != READY
            seconds = f"{self.elapsed_s - row.since_s:.1f}" if starts else ""
            table.add_row(name, row.state, f"{row.since_s:.1f}", seconds, row.what if starts else "serves")
        return table


@contextmanager
def start_table(console: Console) -> Iterator[StartTable]:
    """The table as long as the context is open. What else is printed meanwhile stands above it."""
    if not console.is_terminal:
        yield StartTable(lambda line: console.print(line, markup=False, soft_wrap=True))
        return
    table, stream = StartTable(), sys.stderr
    with Live(table, console=console, refresh_per_second=DRAWINGS_PER_S), _logged_to(sys.stderr, instead_of=stream):
        yield table


@contextmanager
def _logged_to(stream: TextIO, *, instead_of: TextIO) -> Iterator[None]:
    """Handlers keep the stream that they found, past what has the place of it: they would write into the table."""
    loggers = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    found = {handler for logger in (logging.root, *loggers) for handler in logger.handlers}
    moved = [each for each in found if isinstance(each, logging.StreamHandler) and each.stream is instead_of]
    for handler in moved:
        handler.setStream(stream)
    try:
        yield
    finally:
        for handler in moved:
            handler.setStream(instead_of)
