"""Draws the performance page's table of open-loop load as a picture beside it: `python -m benchmarks.draw_load`.

Left the share of streams without a gap, right p95 of first audio, by requests a second; a line for each layout of
cards, precision and prompt.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results" / "performance.md"
PICTURE = ROOT / "docs" / "pictures" / "load.svg"
HEADING = "## Throughput and latency under load"
COLUMNS = ("cards", "precision", "prompt", "rate", "answered", "ttft", "first_audio", "rtf", "no_gap", "underrun")
REPEATED = ("cards", "precision", "prompt")
"""An empty cell of these columns stands for the one above it."""
COLOURS = {
    "1 H200": "tab:green", "1 H100": "tab:olive", "2 H200": "tab:red", "2 H100": "tab:orange", "4 H100": "tab:blue"
}  # fmt: skip
STYLES = {"shipped": "-", "low": "--", "code2wav low": "-."}
OTHER_STYLE = ":"


@dataclass(frozen=True, slots=True)
class Point:
    """What a rate gave."""

    requests_per_s: float
    first_audio_p95_s: float
    no_gap_percent: float


def lines_of(page: str) -> Mapping[tuple[str, str, str], Sequence[Point]]:
    """By cards, precision and prompt, in the order of the page."""
    lines: dict[tuple[str, str, str], list[Point]] = defaultdict(list)
    for row in _rows(page):
        key = row["cards"].split(":")[0], row["precision"], row["prompt"]
        lines[key].append(
            Point(_number(row["rate"]), _number(row["first_audio"].split("/")[1]), _number(row["no_gap"]))
        )
    return lines


def _rows(page: str) -> Iterator[Mapping[str, str]]:
    section = page[page.index(HEADING) :]
    above: dict[str, str] = {}
    for line in re.findall(r"^\|(.*)\|$", section[: section.index("\n\n", section.index("\n|"))], re.MULTILINE)[2:]:
        row = dict(zip(COLUMNS, (cell.strip() for cell in line.split("|")), strict=True))
        row |= {name: row[name] or above[name] for name in REPEATED}
        yield (above := row)


def _number(cell: str) -> float:
    if (found := re.search(r"[\d.]+", cell)) is None:
        raise ValueError(f"{cell!r} of the table in {PAGE.name} has no number")
    return float(found[0])


def draw(lines: Mapping[tuple[str, str, str], Sequence[Point]], path: Path) -> None:
    """The same lines give the same bytes."""
    with rc_context({"svg.hashsalt": "load", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(11, 5), layout="constrained")
        FigureCanvasAgg(figure)
        no_gap, first_audio = figure.subplots(1, 2)
        for key, points in lines.items():
            rates = [point.requests_per_s for point in points]
            style = _style(*key)
            no_gap.plot(rates, [point.no_gap_percent for point in points], **style)
            first_audio.plot(rates, [point.first_audio_p95_s for point in points], **style)
        no_gap.axhline(99, color="grey", linewidth=0.5)
        no_gap.set(ylim=(0, 103), ylabel="streams without a gap, %")
        first_audio.set(yscale="log", ylabel="first audio, p95, s")
        first_audio.minorticks_off()
        first_audio.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
        for panel in (no_gap, first_audio):
            panel.set(xlabel="requests a second, Poisson, 10.24 s of sound each", xlim=(0, None))
            panel.grid(alpha=0.3)
        figure.legend(*no_gap.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _style(cards: str, precision: str, prompt: str) -> dict[str, Any]:
    colour = next(colour for start, colour in COLOURS.items() if cards.startswith(start))
    tokens, *rest = prompt.split(",")
    words = "mixed requests" if prompt == "mixed" else ",".join([f"{tokens} tokens", *rest])
    return {
        "label": f"{cards.split(',')[0]}, {precision.replace('`', '')}, {words}",
        "color": colour, "marker": "o", "markersize": 3,
        "linestyle": STYLES.get(precision, OTHER_STYLE), "linewidth": 0.9 if prompt == "mixed" else 1.6,
    }  # fmt: skip


if __name__ == "__main__":
    draw(lines_of(PAGE.read_text()), PICTURE)
