"""`omni-cluster bench --compare A B`: what one result takes more than another, cell by cell."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from omni_cluster.bench.errors import BenchError
from omni_cluster.bench.result import Cell, Result, read_result
from omni_cluster.bench.table import wide_console

LATENCIES = {
    "first_text_s": "first text",
    "first_audio_s": "first audio",
    "first_audible_s": "first audible",
    "jct_s": "JCT",
    "stall_s": "stall",
}
LENGTHS = ("prompt_tokens", "text_tokens", "codec_tokens", "mix", "turns")


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of a cell in both results, in `unit`."""

    cell: str
    figure: str
    unit: str
    a: float
    b: float

    @property
    def more(self) -> float:
        """What A has more than B."""
        return self.a - self.b

    @property
    def more_percent(self) -> float | None:
        """The same as a part of B; None when B is zero."""
        return 100 * self.more / self.b if self.b else None


def differences(a: Result, b: Result) -> list[Difference]:
    """Of all cells that both have. Raises BenchError when they have none in common, or other lengths of requests."""
    for name in LENGTHS:
        lengths = getattr(a.load, name), getattr(b.load, name)
        if lengths[0] != lengths[1]:
            raise BenchError(f"{name} is {lengths[0]} in A and {lengths[1]} in B; compare runs of one load.")
    others = {cell.name: cell for cell in b.cells}
    pairs = [(cell, others[cell.name]) for cell in a.cells if cell.name in others]
    if not pairs:
        names = ["/".join(cell.name for cell in result.cells) or "none" for result in (a, b)]
        raise BenchError(f"A has the loads {names[0]} and B {names[1]}; compare runs that share one.")
    return [difference for pair in pairs for difference in _of_cell(*pair)]


def _of_cell(a: Cell, b: Cell) -> Iterator[Difference]:
    for name, title in LATENCIES.items():
        if name in a.figures and name in b.figures:
            for percentile in ("p50", "p99"):
                seconds = (getattr(cell.figures[name], percentile) for cell in (a, b))
                in_ms = [1000 * value for value in seconds]
                yield Difference(a.name, f"{title} {percentile}", "ms", in_ms[0], in_ms[1])
    yield Difference(a.name, "requests", "1/s", a.requests_per_s, b.requests_per_s)
    yield Difference(a.name, "audio", "s/s", a.audio_s_per_s, b.audio_s_per_s)


def difference_table(a: Result, b: Result) -> Table:
    table = Table("load", "figure", "unit", title=escape(f"A: {a.target}, {a.date}; B: {b.target}, {b.date}"))
    for name in ("A", "B", "A - B", "% of B"):
        table.add_column(name, justify="right")
    for difference in differences(a, b):
        cell, figure, unit, of_a, of_b = dataclasses.astuple(difference)
        percent = difference.more_percent
        shown = "-" if percent is None else f"{percent:+.1f}"
        table.add_row(cell, figure, unit, f"{of_a:.3f}", f"{of_b:.3f}", f"{difference.more:+.3f}", shown)
    return table


def run_compare(a: Path, b: Path) -> None:
    """Prints the table. Raises BenchError."""
    console = wide_console()
    results = read_result(a), read_result(b)
    console.print(difference_table(*results))
    for path, result in zip((a, b), results, strict=True):
        for cell in result.cells:
            if cell.errors:
                failed = f"{cell.errors} of {cell.requests} requests of {cell.name} failed and are in none of its times"
                console.print(f"{path}: {failed}", markup=False, soft_wrap=True)
