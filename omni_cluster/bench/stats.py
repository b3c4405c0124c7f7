"""From the records of one cell to its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from omni_cluster.bench.player import play, played_at_s
from omni_cluster.bench.record import RequestRecord
from omni_cluster.bench.result import Arrivals, Cell, Percentiles

Figure = Callable[[RequestRecord], float | None]

FIGURES: Mapping[str, Figure] = {
    "first_text_s": lambda r: r.text_s[0] if r.text_s else None,
    "last_text_s": lambda r: r.text_s[-1] if r.text_s else None,
    "first_audio_s": lambda r: r.audio[0].at_s if r.audio else None,
    "first_audible_s": lambda r: None if r.audible_at is None else played_at_s(r.audio, r.audible_at, r.sample_rate_hz),
    "jct_s": lambda r: r.total_s,
    "rtf": lambda r: r.total_s / r.audio_s if r.audio_s else None,
    "audio_s": lambda r: r.audio_s,
    "audio_chunks": lambda r: len(r.audio),
    "underruns": lambda r: play(r.audio, r.sample_rate_hz).underruns,
    "stall_s": lambda r: play(r.audio, r.sample_rate_hz).stall_s,
    "prompt_tokens": lambda r: r.prompt_tokens,
    "text_tokens": lambda r: r.text_tokens,
    "codec_tokens": lambda r: r.codec_tokens,
}
"""The figures of a cell, by name; None for a request that has no such figure."""


def _of_turns(figure: Figure, are_later: bool) -> Figure:
    return lambda record: figure(record) if bool(record.earlier_turns) == are_later else None


TURN_FIGURES: Mapping[str, Figure] = {
    f"{turns}_{name}": _of_turns(FIGURES[name], are_later)
    for turns, are_later in (("opening", False), ("later", True))
    for name in ("first_text_s", "first_audio_s")
}
"""Further ones of conversations: of their first turns, and of those behind them."""


def percentiles(values: Sequence[float]) -> Percentiles:
    """Of at least one value; between two values by linear interpolation."""
    p50, p90, p95, p99 = map(float, np.percentile(np.asarray(values, np.float64), (50, 90, 95, 99)))
    return Percentiles(p50, p90, p99, p95)


def cell_of(arrivals: Arrivals, level: float, records: Sequence[RequestRecord], wall_s: float) -> Cell:
    """The figures of all requests of a cell; `wall_s` is from when the first was sent until the last had ended.

    Rates count the requests that succeeded.
    """
    good = [record for record in records if record.error is None]
    wanted = {**FIGURES, **(TURN_FIGURES if any(record.earlier_turns for record in good) else {})}
    return Cell(
        arrivals=arrivals,
        level=level,
        requests=len(records),
        errors=len(records) - len(good),
        wall_s=wall_s,
        requests_per_s=len(good) / wall_s,
        audio_s_per_s=sum(record.audio_s for record in good) / wall_s,
        figures=_figures((name, [figure(r) for r in good]) for name, figure in wanted.items()),
        stages={stage: _stage_figures(stage, good) for stage in _in_order(r.stages for r in good)},
        first_error=next((record.error for record in records if record.error is not None), None),
        gapless_share=sum(map(_is_gapless, good)) / len(records),
    )


def _is_gapless(record: RequestRecord) -> bool:
    return bool(record.audio) and not play(record.audio, record.sample_rate_hz).underruns


def _stage_figures(stage: str, records: Sequence[RequestRecord]) -> dict[str, Percentiles]:
    times = [record.stages.get(stage, {}) for record in records]
    return _figures((name, [t.get(name) for t in times]) for name in _in_order(times))


def _figures(named: Iterable[tuple[str, Sequence[float | None]]]) -> dict[str, Percentiles]:
    known = ((name, [value for value in values if value is not None]) for name, values in named)
    return {name: percentiles(values) for name, values in known if values}


def _in_order(mappings: Iterable[Mapping[str, object]]) -> list[str]:
    """All keys, in the order of their first appearance."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))
