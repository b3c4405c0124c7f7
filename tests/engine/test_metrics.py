"""What a stage counts of its requests."""

from __future__ import annotations

import numpy as np
import pytest

from omni_cluster.engine.metrics import StageMetrics
from omni_cluster.outputs import AudioChunk, StageChunk

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
    metrics.hold(3, 2, 4)
    metrics.hold(1, 0, 2)
    names = ("requests_running", "requests_waiting", "open_outboxes")
    assert [value(metrics, name) for name in names] == [1, 0, 2]


def test_names_have_their_units_and_each_a_line_of_help() -> None:
    for metric in StageMetrics().registry.collect():
        assert metric.name.startswith("omni_cluster_stage_") and metric.documentation.endswith(".")
        assert metric.name.endswith("_seconds") == (metric.type == "histogram")
