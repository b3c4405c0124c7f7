"""A result as one picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omni_cluster.bench.result import Cell, Result

FILE_NAME = "result.png"
LATENCIES = {
    "first_text_s": "first text, s",
    "first_audio_s": "first audio, s",
    "first_audible_s": "first audible sound, s",
    "jct_s": "JCT, s",
    "rtf": "RTF",
    "stall_s": "stall, s",
}


def write_plot(result: Result, folder: Path) -> Path | None:
    """A panel for each latency, for streams without a gap, throughput, stages; None where matplotlib is not there."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 12), layout="constrained")
    FigureCanvasAgg(figure)
    cells = sorted(result.cells, key=lambda cell: (cell.arrivals, cell.level))
    *latencies, gapless, throughput, stages = figure.subplots(3, 3).flat
    for (name, title), panel in zip(LATENCIES.items(), latencies, strict=True):
        _draw_latency(panel, cells, name, title)
    _draw_gapless(gapless, cells)
    _draw_throughput(throughput, cells)
    _draw_stages(stages, cells)
    for panel in (*latencies, gapless, throughput):
        panel.tick_params(axis="x", labelrotation=30)
    figure.suptitle(f"{result.target}, {result.model}, {result.date}", parse_math=False)
    path = folder / FILE_NAME
    figure.savefig(path, dpi=100)
    return path


def _draw_latency(panel: Any, cells: Sequence[Cell], name: str, title: str) -> None:
    known = [(cell.name, cell.figures[name]) for cell in cells if name in cell.figures]
    names = [cell for cell, _ in known]
    for percentile in ("p50", "p95", "p99"):
        panel.plot(names, [getattr(figures, percentile) for _, figures in known], marker="o", label=percentile)
    panel.set_ylim(bottom=0)
    _finish(panel, title, legend=bool(known))


def _draw_gapless(panel: Any, cells: Sequence[Cell]) -> None:
    panel.plot([cell.name for cell in cells], [100 * (cell.gapless_share or 0.0) for cell in cells], marker="o")
    panel.set_ylim(0, 105)
    _finish(panel, "streams without a gap, %", legend=False)


def _draw_throughput(panel: Any, cells: Sequence[Cell]) -> None:
    names = [cell.name for cell in cells]
    panel.plot(names, [cell.requests_per_s for cell in cells], marker="o", label="requests/s")
    panel.plot(names, [cell.audio_s_per_s for cell in cells], marker="o", label="audio s/s")
    panel.set_ylim(bottom=0)
    _finish(panel, "throughput", legend=True)


def _draw_stages(panel: Any, cells: Sequence[Cell]) -> None:
    """A bar from a stage's first to its last output, medians."""
    stages = list(dict.fromkeys(stage for cell in cells for stage in cell.stages))
    for row, stage in enumerate(stages):
        bars = [(i, cell.stages.get(stage, {})) for i, cell in enumerate(cells)]
        known = [(i + 0.8 * row / len(stages), times) for i, times in bars if {"first_s", "work_s"} <= set(times)]
        starts, widths = ([times[name].p50 for _, times in known] for name in ("first_s", "work_s"))
        panel.barh([place for place, _ in known], widths, 0.8 / len(stages), left=starts, label=stage)
    panel.set_yticks(range(len(cells)), [cell.name for cell in cells])
    panel.invert_yaxis()
    panel.set_xlim(left=0)
    _finish(panel, "stages at work, s since the request entered", legend=bool(stages))


def _finish(panel: Any, title: str, *, legend: bool) -> None:
    panel.set_title(title)
    panel.grid(alpha=0.3)
    if legend:
        panel.legend()
