"""Draws the board's panels from what a Prometheus has, without Grafana: for a report, or to see what it will show.

python deploy/grafana/draw_board.py OUT.png [--prometheus http://127.0.0.1:9090] [--minutes 5]
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from deploy.grafana.make_board import COLUMNS, PANELS, Panel, sent

STEP_S = 5
UNITS = {"s": "s", "short": "", "bytes": "bytes", "Bps": "bytes/s", "percentunit": "part of 1", "reqps": "a second"}
INCHES = (5.2, 3.0)
"""Of a panel."""
MOST_SERIES = 8
"""Named in a panel; more would hide its lines."""

Series = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.grafana.draw_board", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    parser.add_argument("--minutes", type=float, default=5.0)
    asked = parser.parse_args()
    drawn(asked.prometheus, asked.minutes).savefig(asked.out, dpi=70)


def drawn(prometheus: str, minutes: float) -> Figure:
    """All panels, in the board's order."""
    rows = math.ceil(len(PANELS) / COLUMNS)
    figure = Figure(figsize=(INCHES[0] * COLUMNS, INCHES[1] * rows), layout="constrained")
    FigureCanvasAgg(figure)
    now_s = time.time()
    for number, panel in enumerate(PANELS, 1):
        axes = figure.add_subplot(rows, COLUMNS, number)
        axes.set_title(panel.title, loc="left", fontsize=11)
        axes.set_ylabel(UNITS[panel.unit], fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        _draw(axes, panel, prometheus, now_s, minutes)
        axes.set_ylim(bottom=0)
    return figure


def _draw(axes: Any, panel: Panel, prometheus: str, now_s: float, minutes: float) -> None:
    lines = 0
    for query in panel.queries:
        for series in history(prometheus, sent(query.expression), now_s - 60 * minutes, now_s):
            at_min = [(at_s - now_s) / 60 for at_s, _ in series["values"]]
            name = named(query.legend, series["metric"]) if lines < MOST_SERIES else None
            axes.plot(at_min, [float(value) for _, value in series["values"]], label=name, linewidth=1.2)
            lines += 1
    if lines:
        axes.legend(fontsize=7)


def history(prometheus: str, expression: str, start_s: float, end_s: float) -> Series:
    """Each series of the expression, with its values. Raises urllib.error.URLError where no Prometheus answers."""
    asked = urllib.parse.urlencode({"query": expression, "start": start_s, "end": end_s, "step": STEP_S})
    with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{asked}", timeout=30) as answer:
        found: Series = json.load(answer)["data"]["result"]
    return found


def named(legend: str, labels: Mapping[str, str]) -> str:
    """Grafana's legend with the series' labels in it; of a replica's name the end is enough."""

    def value(found: re.Match[str]) -> str:
        whole = labels.get(found[1], "")
        return whole[-8:] if found[1] == "replica" else whole

    return re.sub(r"\{\{(\w+)\}\}", value, legend) or "all"


if __name__ == "__main__":
    main()
