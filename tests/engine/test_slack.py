"""How close a sound stage is to letting its players fall silent."""

from __future__ import annotations

import time

import pytest

from omni_cluster.engine.slack import CUSHION_S, Slack
from omni_cluster.engine.step_cost import StepCost
from omni_cluster.models.family import StepTime

STEPS, MAX_FRAMES = 9, 3_072


def slack(step_s: float | None = None, max_frames: int = MAX_FRAMES) -> Slack:
    """Of nothing that was measured yet, or of a step."""
    cost = StepCost(1e-2, 1.05e-5)
    if step_s is not None:
        cost.observe(StepTime(72, step_s))
    return Slack(STEPS, max_frames, cost, time.monotonic)


def test_a_round_costs_all_steps_of_a_piece_for_each_player_and_one_pass() -> None:
    of = slack(max_frames=1_440)
    assert of.round_s(10) == pytest.approx(9 * (0.01 + 1.05e-5 * 720) + 4e-3 + 2.5e-5 * 720)
    assert of.round_s(40) == pytest.approx(9 * (2 * 0.01 + 1.05e-5 * 2_880) + 4e-3 + 2.5e-5 * 2_880)  # two steps each


def test_a_round_is_learned_from_pieces_of_urgent_players_and_from_passes() -> None:
    of = slack()
    seen_s = [of.round_s(4)]
    of.began(10_000, left_s=3.0)
    assert of.round_s(4) == seen_s[0]
    of.began(10_000, left_s=0.2)
    seen_s.append(of.round_s(4))
    of.finished(StepTime(720, 0.5))
    assert seen_s[0] < seen_s[1] < of.round_s(4)


def test_slack_is_used_up_by_players_that_a_round_cannot_serve_in_time() -> None:
    # 0.094 + 0.0086 n is 0.15 for 6.5: so many can be served before what they have is heard
    of = slack()
    assert of.most_players() == 6 and of.round_s(6) <= CUSHION_S < of.round_s(7)
    assert (slack(step_s=1_000).most_players(), of.use()) == (1, 0)
    with of.player("first"), of.player("second"), of.player("third") as third:
        assert of.use() == 0.5
        third.deliver(60, time.monotonic())
        assert of.use() == pytest.approx(2 / 6)
    assert of.use() == 0
