"""What a stage counts of its requests."""

from __future__ import annotations

import numpy as np
import pytest

from omni_cluster.engine.exposition import missing, text_of
from omni_cluster.engine.metrics import StageMetrics
from omni_cluster.types.inputs import KnownOutput
from omni_cluster.types.outputs import AudioChunk, StageChunk
from tests.server.samples import totals

SOUND = StageChunk(audio=AudioChunk(0, np.zeros(480, np.float32), 24_000))


def value(metrics: StageMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"omni_cluster_stage_{name}", labels)


def test_what_is_made_is_counted_as_it_comes() -> None:
    metrics = StageMetrics()
    meter = metrics.begin()
    meter.made(StageChunk(token_ids=(1, 2), text="a", cached_tokens=32))
    meter.made(SOUND)
    meter.made(StageChunk(finish_reason="stop"))
    assert (value(metrics, "tokens_total"), value(metrics, "samples_total")) == (2, 480)
    assert value(metrics, "cached_tokens_total") == 32
    assert value(metrics, "pieces_total") == 2
    assert (meter.tokens, meter.samples) == (2, 480)


def test_what_a_stage_says_again_is_not_counted_again() -> None:
    metrics = StageMetrics()
    meter = metrics.begin(KnownOutput((1, 2, 3)))
    meter.made(StageChunk(token_ids=(1, 2, 3)))
    assert value(metrics, "first_output_seconds_count") == value(metrics, "pieces_total") == 0
    meter.made(StageChunk(3, (4, 5), "b"))
    meter.made(StageChunk(5, finish_reason="stop"))
    joined = metrics.begin(KnownOutput((1, 2, 3)))
    joined.made(StageChunk(0, (1, 2, 3, 4, 5), "b", finish_reason="stop"))
    assert (meter.tokens, joined.tokens, value(metrics, "tokens_total")) == (2, 2, 4)
    assert value(metrics, "first_output_seconds_count") == 2


def test_the_first_output_is_timed_once_and_the_end_is_none() -> None:
    metrics = StageMetrics()
    metrics.begin().made(StageChunk(finish_reason="stop"))
    assert value(metrics, "first_output_seconds_count") == 0
    meter = metrics.begin()
    meter.made(SOUND)
    meter.made(SOUND)
    assert value(metrics, "first_output_seconds_count") == 1


def test_a_request_ends_once() -> None:
    metrics = StageMetrics()
    meter = metrics.begin()
    assert meter.end("finished")
    assert not meter.end("cancelled")
    assert value(metrics, "requests_total", outcome="finished") == 1
    assert value(metrics, "requests_total", outcome="cancelled") == 0
    assert value(metrics, "request_seconds_count") == 1
    assert value(metrics, "request_seconds_sum") == pytest.approx(meter.seconds)


def test_every_outcome_is_there_before_the_first_request() -> None:
    assert {value(StageMetrics(), "requests_total", outcome=o) for o in ("finished", "failed", "cancelled")} == {0}


def test_a_chunk_that_came_before_it_was_made_came_at_once() -> None:
    metrics = StageMetrics()
    meter = metrics.begin()
    meter.handed_over(-3.0)
    meter.handed_over(0.75)
    assert value(metrics, "handover_seconds_count") == 2
    assert value(metrics, "handover_seconds_sum") == 0.75


def test_what_is_held_is_what_was_said_last() -> None:
    metrics = StageMetrics()
    metrics.hold({"running": 3, "waiting": 2, "held": 3}, 4)
    metrics.hold({"running": 1, "waiting": 0, "held": 1, "steps": 9}, 2, 700)
    names = ("requests_running", "requests_waiting", "requests_held", "open_outboxes", "held_bytes")
    assert [value(metrics, name) for name in names] == [1, 0, 1, 2, 700]
    metrics.hold({"running": 1, "waiting": 0}, 2)  # an engine whose requests wait for no rows says nothing of them
    assert value(metrics, "requests_held") == 0


def test_names_have_their_units_and_each_a_line_of_help() -> None:
    for metric in StageMetrics().registry.collect():
        assert metric.name.startswith("omni_cluster_stage_") and metric.documentation.endswith(".")
        assert metric.name.endswith("_seconds") == (metric.type == "histogram")


def test_a_backlog_is_what_open_requests_usually_say_less_what_they_have_said() -> None:
    metrics = StageMetrics()
    first, second, third = metrics.begin(), metrics.begin(), metrics.begin()
    assert metrics.backlog_tokens == 0  # nobody has finished yet
    first.made(StageChunk(token_ids=(1,) * 100))
    first.end("finished")
    second.made(StageChunk(token_ids=(1,) * 30))
    assert metrics.backlog_tokens == 70 + 100
    third.end("cancelled")
    second.made(StageChunk(30, (1,) * 90))
    assert metrics.backlog_tokens == 0  # it says more than usual
    second.end("finished")
    metrics.begin()
    assert metrics.backlog_tokens == pytest.approx(101)  # a twentieth of the way from 100 to 120


def test_those_that_are_missing_are_counted_by_stage() -> None:
    assert totals(text_of([missing({"first": 0, "second": 2})]).decode()) == {
        ("scrape_missing", "first"): 0,
        ("scrape_missing", "second"): 2,
    }
