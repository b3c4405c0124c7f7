"""Results and their differences as tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from omni_cluster.bench.result import Cell, Percentiles, Result

PLAIN_WIDTH = 180
"""Columns where no terminal says how many it has."""


def wide_console() -> Console:
    """On stdout, wide enough for a table also where that is a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def print_result(result: Result, console: Console) -> None:
    """What a client sees of each cell, what a listener does, and what each stage says of itself."""
    console.print(f"{result.target}, model {result.model}, {_lengths(result)}", markup=False, soft_wrap=True)
    console.print(client_table(result))
    console.print(listener_table(result))
    if result.load.turns > 1:
        console.print(turns_table(result))
    if result.capacity is not None:
        console.print(str(result.capacity), markup=False, soft_wrap=True)
    for cell in result.cells:
        if cell.errors:
            line = f"{cell.name}: {cell.errors} of {cell.requests} requests failed, the first: {cell.first_error}"
            console.print(line, markup=False, soft_wrap=True)
    console.print(stage_table(result))


def _lengths(result: Result) -> str:
    load, mix = result.load, result.load.mix
    words = f"{load.prompt_tokens} words{_counted(result)}"
    lengths = f"{words}, {load.text_tokens} text tokens, {load.codec_tokens} codec tokens a request"
    if mix is not None:
        (fewest, most), (shortest, longest) = mix.prompt_tokens, mix.sound_s
        prompts = f"prompts of {fewest} to {most} tokens, {100 * mix.spoken_share:g} % of them spoken"
        lengths = f"{prompts}, {shortest:g} to {longest:g} s of sound"
    turns = f", conversations of {load.turns} turns" if load.turns > 1 else ""
    return f"{lengths}, {'streamed' if load.stream else 'not streamed'}{turns}"


def _counted(result: Result) -> str:
    """What the server counted of the first cell's prompts: a made vocabulary has five or six tokens for a word."""
    counts = [cell.figures["prompt_tokens"].p50 for cell in result.cells if "prompt_tokens" in cell.figures]
    return f" (median prompt: {counts[0]:.0f} tokens)" if counts and counts[0] else ""


def client_table(result: Result) -> Table:
    table = Table(title="seconds: p50 / p90 / p99")
    for name in ("load", "requests", "errors", "requests/s", "audio s/s"):
        table.add_column(name, justify="left" if name == "load" else "right")
    for name in ("first text", "first audio", "JCT", "RTF", "underruns"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in result.cells:
        table.add_row(*_client_row(cell))
    return table


def _client_row(cell: Cell) -> Iterator[str]:
    yield from (cell.name, str(cell.requests), str(cell.errors))
    yield from (f"{cell.requests_per_s:.3f}", f"{cell.audio_s_per_s:.3f}")
    for name in ("first_text_s", "first_audio_s", "jct_s", "rtf"):
        yield shown(cell.figures.get(name))
    yield shown(cell.figures.get("underruns"), digits=0)


def listener_table(result: Result) -> Table:
    table = Table("load", title="a player that starts with the first sound, seconds: p50 / p95 / p99")
    for name in ("streams without a gap", "first audible sound", "stall"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in result.cells:
        heard = (shown(cell.figures.get(name), middle="p95") for name in ("first_audible_s", "stall_s"))
        table.add_row(cell.name, gapless_percent(cell), *heard)
    return table


def turns_table(result: Result) -> Table:
    table = Table("load", title="turns of conversations, seconds: p50 / p90 / p99")
    for name in ("first text, first turn", "later turns", "first audio, first turn", "later turns"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in result.cells:
        names = [f"{turns}_{name}" for name in ("first_text_s", "first_audio_s") for turns in ("opening", "later")]
        table.add_row(cell.name, *[shown(cell.figures.get(name)) for name in names])
    return table


def gapless_percent(cell: Cell) -> str:
    return "-" if cell.gapless_share is None else f"{100 * cell.gapless_share:.1f} %"


def stage_table(result: Result) -> Table:
    """A column for each time that any stage tells of."""
    stages = [(cell.name, stage, times) for cell in result.cells for stage, times in cell.stages.items()]
    names = list(dict.fromkeys(name for _, _, times in stages for name in times))
    table = Table("load", "stage", title="stages, seconds; first and last since the request entered: p50 / p90 / p99")
    for name in names:
        table.add_column(name.removesuffix("_s"), justify="right", no_wrap=True)
    for cell, stage, times in stages:
        table.add_row(cell, stage, *[shown(times.get(name)) for name in names])
    return table


def shown(figures: Percentiles | None, digits: int = 3, middle: str = "p90") -> str:
    values = [getattr(figures, name) for name in ("p50", middle, "p99")] if figures else [None]
    return " / ".join("-" if value is None else f"{value:.{digits}f}" for value in values)
