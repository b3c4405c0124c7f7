from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from omni_cluster.bench.record import RequestRecord, Sound, stage_seconds
from omni_cluster.bench.result import Percentiles
from omni_cluster.bench.stats import cell_of, percentiles
from tests.bench.records import SECOND, gapless, record


def test_percentiles() -> None:
    assert percentiles([float(n) for n in range(101)]) == Percentiles(50.0, 90.0, 99.0, 95.0)
    assert percentiles([3.0]) == Percentiles(3.0, 3.0, 3.0, 3.0)
    assert percentiles([2.0, 1.0]).p50 == 1.5


def test_the_figures_of_a_cell() -> None:
    cell = cell_of("closed", 2, [record(0), record(1), record(2, slower=2.0)], wall_s=10.0)
    assert (cell.name, cell.requests, cell.errors, cell.first_error) == ("closed 2", 3, 0, None)
    assert cell.requests_per_s == pytest.approx(0.3)
    assert cell.audio_s_per_s == pytest.approx(0.6)
    medians = {name: figures.p50 for name, figures in cell.figures.items()}
    assert medians == pytest.approx(
        {
            "first_text_s": 0.1, "last_text_s": 0.2, "first_audio_s": 1.0, "first_audible_s": 1.5, "jct_s": 4.0,
            "rtf": 2.0, "audio_s": 2.0, "audio_chunks": 2, "underruns": 1, "stall_s": 1.0, "prompt_tokens": 10,
            "text_tokens": 2, "codec_tokens": 100,
        }
    )  # fmt: skip
    assert cell.figures["jct_s"].p99 == pytest.approx(8.0, rel=0.02)


def test_streams_without_a_gap_are_told_of_all_requests() -> None:
    silent = RequestRecord(2, 1.0, text_s=(0.5,), sample_rate_hz=SECOND)
    cell = cell_of("open", 1, [record(0), gapless(1), silent, record(3, error="no."), gapless(4)], 10.0)
    assert cell.gapless_share == pytest.approx(2 / 5)


def test_first_and_later_turns_are_told_apart_where_there_are_later_ones() -> None:
    later = [dataclasses.replace(record(number, slower=2.0), earlier_turns=number) for number in (1, 2)]
    figures = cell_of("open", 1, [record(0), *later], 10.0).figures
    assert (figures["opening_first_text_s"].p50, figures["later_first_text_s"].p50) == pytest.approx((0.1, 0.2))
    assert (figures["opening_first_audio_s"].p50, figures["later_first_audio_s"].p50) == pytest.approx((1.0, 2.0))
    assert not {name for name in cell_of("open", 1, [record(0)], 10.0).figures if name.startswith(("opening", "later"))}


def test_sound_is_heard_from_its_first_loud_sample_on() -> None:
    sound = Sound()
    for piece in ([0.0, 0.009], [-0.02, 0.5], [0.5]):
        sound.add(np.array(piece, np.float32), 1.0)
    assert (sound.audible_at, sound.samples, len(sound.arrivals)) == (2, 5, 3)
    silent = Sound()
    silent.add(np.zeros(3, np.float32), 1.0)
    assert silent.audible_at is None


def test_a_silent_answer_has_no_first_audible_sound() -> None:
    cell = cell_of("open", 1, [dataclasses.replace(record(), audible_at=None)], 10.0)
    assert "first_audio_s" in cell.figures and "first_audible_s" not in cell.figures


def test_requests_that_failed_are_counted_and_are_in_no_figure() -> None:
    cell = cell_of("open", 0.5, [record(0), record(1, error="the first."), record(2, error="the second.")], 10.0)
    assert (cell.name, cell.requests, cell.errors, cell.first_error) == ("open 0.5/s", 3, 2, "the first.")
    assert cell.requests_per_s == pytest.approx(0.1)
    assert cell.figures["jct_s"] == Percentiles(4.0, 4.0, 4.0, 4.0)


def test_a_cell_without_any_success_has_no_figures() -> None:
    cell = cell_of("closed", 1, [record(error="no.")], 1.0)
    assert (cell.figures, cell.stages, cell.requests_per_s) == ({}, {}, 0.0)


def test_an_answer_without_sound_has_no_time_of_sound() -> None:
    cell = cell_of("closed", 1, [RequestRecord(0, 1.0, text_s=(0.5,), sample_rate_hz=SECOND)], 1.0)
    assert {"first_audio_s", "first_audible_s", "rtf"}.isdisjoint(cell.figures)
    assert cell.figures["underruns"].p99 == 0.0


def test_every_time_of_a_stage_is_told_whatever_its_name() -> None:
    times = stage_seconds({"a": {"first_s": 1.0, "last_s": 3.5, "tokens": 7, "pulled_s": 0.25, "gone_s": None}})  # type: ignore[dict-item]
    assert times == {"a": {"first_s": 1.0, "last_s": 3.5, "pulled_s": 0.25, "work_s": 2.5}}
    cell = cell_of(
        "closed",
        1,
        [RequestRecord(0, 1.0, stages=times, sample_rate_hz=SECOND), RequestRecord(1, 1.0, sample_rate_hz=SECOND)],
        1.0,
    )
    assert cell.stages["a"]["pulled_s"] == Percentiles(0.25, 0.25, 0.25, 0.25)
