"""The simulated day: what it keeps, and that its policy gives up cards at night and has them by noon."""

from __future__ import annotations

import numpy as np
import pytest

from omni_cluster.models.registry import known_families
from omni_cluster.planning.measured import measured_of
from omni_cluster.planning.simulation import DayFigures, day_rates, simulate
from omni_cluster.planning.work import FULL, pipeline

MEASURED = measured_of(known_families()[0])
PIPELINE = pipeline(MEASURED, "pair", MEASURED.card.request)
HOURS_S = 3 * 3600
START_S = MEASURED.start_s.value


def day(front: int, sound: int, load: float = FULL, bursts: int = 0, seed: int = 0, follows: bool = True) -> DayFigures:
    """Three hours in place of a day, at `load` of what so many cards carry."""
    text, codes, last = PIPELINE.stages
    peak_per_s = load * min(front * codes.carries_per_s, sound * last.carries_per_s)
    rules = PIPELINE.rules({text.name: front, codes.name: front, last.name: sound})
    rates = day_rates(peak_per_s, bursts, seed, HOURS_S)
    return simulate(PIPELINE, rules, rates, START_S, seed, follows)


def test_a_day_on_a_thousand_cards_saves_cards_and_loses_next_to_nothing() -> None:
    followed, fixed = day(540, 460), day(540, 460, follows=False)
    assert followed.answers == fixed.answers > 10_000_000
    assert fixed.gpu_hours == pytest.approx(fixed.fixed_gpu_hours) == pytest.approx(3_000)
    assert followed.gpu_hours < 0.8 * fixed.gpu_hours
    assert fixed.without_gap == pytest.approx(1.0, abs=1e-3)
    assert followed.without_gap > 0.99
    assert followed.first_audio_p95_s < 1.1 * fixed.first_audio_p95_s
    assert followed.below_need == 0


def test_bursts_cost_some_streams_a_gap() -> None:
    calm, bursts = day(54, 46, seed=3), day(54, 46, bursts=4, seed=3)
    assert bursts.answers > calm.answers
    assert 0.9 < bursts.without_gap < calm.without_gap
    assert bursts.below_need == 0


def test_more_than_the_cards_carry_is_seen() -> None:
    within, over = day(3, 3), day(3, 3, load=1.6)
    assert within.without_gap > 0.98 and within.first_audio_p95_s < 0.6
    assert over.without_gap < 0.9 and over.first_audio_p95_s > 10


def test_a_seed_gives_the_same_day_again() -> None:
    assert day(3, 3, bursts=2, seed=3) == day(3, 3, bursts=2, seed=3) != day(3, 3, bursts=2, seed=4)


def test_a_day_is_quiet_at_its_ends_and_no_burst_goes_beyond_the_peak() -> None:
    rates = day_rates(10.0, bursts=5, seed=0, seconds=HOURS_S)
    assert np.max(rates) == 10.0
    assert rates[0] == pytest.approx(1.5)
    assert day_rates(10.0, seconds=HOURS_S).sum() < rates.sum()
