"""How long first sounds wait where the chunks behind them came late."""

from __future__ import annotations

import pytest

from omni_cluster.engine.sound.playout import DECAY, MARGIN_S, PlayoutDelay

MOST_S = 0.08


@pytest.fixture
def playout() -> PlayoutDelay:
    return PlayoutDelay(MOST_S)


def test_nothing_is_delayed_before_anything_came_and_where_all_comes_in_time(playout: PlayoutDelay) -> None:
    assert playout.delay_s(7.0) == 0
    for now_s in (7.0, 7.1, 8.0):
        playout.came(-MARGIN_S, now_s)
        playout.came(-2.0, now_s)
        assert playout.delay_s(now_s) == 0


def test_the_latest_chunk_and_a_margin_delay_what_follows(playout: PlayoutDelay) -> None:
    for late_s in (-0.04, -0.01, 0.02, -0.03):
        playout.came(late_s, 7.0)
    assert playout.delay_s(7.0) == pytest.approx(0.02 + MARGIN_S)
    playout.came(0.05, 7.0)
    assert playout.delay_s(7.0) == MOST_S


def test_after_a_minute_in_time_nothing_is_delayed_any_more(playout: PlayoutDelay) -> None:
    playout.came(MOST_S, 7.0)
    delays = []
    for now_s in range(7, 80):
        playout.came(-1.0, float(now_s))
        delays.append(playout.delay_s(now_s))
    assert delays == sorted(delays, reverse=True) and delays[0] == MOST_S and delays[-1] == 0
    assert playout.delay_s(7.0 + (MOST_S + MARGIN_S) / DECAY) == 0, "nor without any chunk"


def test_what_no_delay_would_have_helped_delays_nothing(playout: PlayoutDelay) -> None:
    playout.came(-0.03, 7.0)
    playout.came(1.01 * MOST_S, 7.0)
    assert playout.delay_s(7.0) == pytest.approx(MARGIN_S - 0.03)


def test_a_stage_may_delay_nothing() -> None:
    playout = PlayoutDelay(0.0)
    for late_s in (-0.01, 0.0, 0.01, 1.0):
        playout.came(late_s, 7.0)
    assert playout.delay_s(7.0) == 0
