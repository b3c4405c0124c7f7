"""Which jobs the next step advances, and what is learned of a step's cost."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_cluster.engine.sound.scheduler import Slack, StepCost, StepScheduler
from omni_cluster.models.sound import LinearCost, SoundPriors, StepTime

NOW_S = 100.0
STEP_S, UNIT_S = 3e-3, 6e-6
PRIORS = SoundPriors(
    step=LinearCost(STEP_S, UNIT_S),
    finish=LinearCost(4e-3, 2.5e-5),
    usual_sizes=(48, 3_072),
    worth_finishing=1_280,
    finish_ahead_s=0.15,
    newcomer_steps=4,
    piece_size=72.0,
    cushion_s=0.15,
)
HALF = 500
"""Frames of a step that spends half of its time on them."""


@dataclass(eq=False)
class Asked:
    size: int
    due_s: float
    steps_left: int = 9


def cost_of(step_s: float = STEP_S, unit_s: float = UNIT_S) -> StepCost:
    return StepCost(LinearCost(step_s, unit_s), PRIORS.usual_sizes)


def scheduler(max_size: int = 3072, max_jobs: int = 64) -> StepScheduler:
    return StepScheduler(max_size, max_jobs, PRIORS, cost_of(), lambda: NOW_S)


def test_without_jobs_there_is_no_step_and_nothing_to_finish() -> None:
    assert scheduler().choose([]) == [] and scheduler().to_finish([], others=True) == []


def test_what_is_due_first_goes_first_and_others_wait_while_it_is_urgent() -> None:
    new, soon, later = Asked(48, NOW_S), Asked(216, NOW_S + 3), Asked(1300, NOW_S + 4)
    assert scheduler().choose([later, soon, new]) == [new, soon]


def test_steps_grow_with_the_work_that_waits() -> None:
    jobs = [Asked(408, NOW_S + 60 + i) for i in range(60)]
    sizes = [len(scheduler().choose(jobs[:count])) for count in (1, 2, 6, 24)]
    assert sizes == [1, 2, 4, 7]
    assert sum(job.size for job in scheduler().choose(jobs)) <= 3072


def test_steps_are_as_large_as_it_takes_to_meet_what_is_due() -> None:
    jobs = [Asked(216, NOW_S + 0.2) for _ in range(14)]
    assert len(scheduler().choose(jobs)) > 2 * HALF / 216


def test_what_cannot_be_met_is_done_in_the_largest_steps() -> None:
    jobs = [Asked(216, NOW_S - 1) for _ in range(64)]
    assert sum(job.size for job in scheduler().choose(jobs)) == 3072 // 216 * 216


def test_a_job_above_the_bound_advances_alone_when_it_is_due_first() -> None:
    whole = Asked(5000, NOW_S)
    assert scheduler().choose([Asked(48, NOW_S + 1), whole]) == [whole]


def test_a_job_that_fits_goes_on_beside_one_that_does_not() -> None:
    new, whole, small = Asked(48, NOW_S), Asked(5000, NOW_S + 2), Asked(48, NOW_S + 3)
    assert scheduler().choose([new, whole, small]) == [new, small]


@given(
    st.lists(st.tuples(st.integers(1, 6000), st.floats(-1, 9), st.integers(1, 9)), min_size=1, max_size=80),
    st.integers(1, 8),
)
def test_a_step_holds_what_is_due_first_and_stays_within_its_bounds(
    asked: list[tuple[int, float, int]], max_jobs: int
) -> None:
    jobs = [Asked(size, NOW_S + due_s, steps) for size, due_s, steps in asked]
    chosen = scheduler(max_jobs=max_jobs).choose(jobs)
    assert chosen[0].due_s == min(job.due_s for job in jobs)
    assert len(set(map(id, chosen))) == len(chosen) <= max_jobs and all(job in jobs for job in chosen)
    assert len(chosen) == 1 or sum(job.size for job in chosen) <= 3072


@pytest.mark.parametrize(
    ("due_in_s", "size", "others", "is_finished"),
    [
        (5.0, 48, True, False),
        (5.0, 48, False, True),
        (PRIORS.finish_ahead_s, 48, True, True),
        (-1.0, 48, True, True),
        (5.0, 700, True, True),
    ],
)
def test_a_job_is_finished_when_it_is_due_or_worth_it_or_nothing_else_runs(
    due_in_s: float, size: int, others: bool, is_finished: bool
) -> None:
    later, sooner = Asked(size, NOW_S + 9, 0), Asked(size, NOW_S + due_in_s, 0)
    assert scheduler().to_finish([later, sooner], others) == ([sooner, later] if is_finished else [])


# ------------------------------------------------------------- what a step costs


def test_cost_is_what_was_assumed_until_steps_are_measured() -> None:
    cost = cost_of()
    assert cost.size_at_efficiency(0.5) == pytest.approx(HALF)
    assert cost.size_at_efficiency(0.75) == pytest.approx(3 * HALF)


@given(st.floats(1, 1e6), st.floats(1, 1e4))
def test_steps_of_the_balanced_size_take_the_least_time(work: float, other: float) -> None:
    cost = cost_of()

    def together_s(size: float) -> float:
        return (work / size + 10) * (STEP_S + UNIT_S * size)

    assert together_s(cost.size_at_balance(work, 10)) <= together_s(other) * (1 + 1e-9)


def test_cost_becomes_what_is_measured() -> None:
    cost = cost_of()
    for i in range(2000):
        size = PRIORS.usual_sizes[0] + 37 * (i % 60)
        cost.observe(StepTime(size, 10e-3 + 8e-6 * size))
    assert cost.step_s == pytest.approx(10e-3, rel=0.05) and cost.unit_s == pytest.approx(8e-6, rel=0.05)


@pytest.mark.parametrize("size", [24, 3072])
def test_cost_stays_sensible_when_all_steps_are_alike(size: int) -> None:
    cost = cost_of()
    for _ in range(2000):
        cost.observe(StepTime(size, 0.02))
    assert cost.step_s > 0 and cost.unit_s > 0
    assert cost.step_s + cost.unit_s * size == pytest.approx(0.02, rel=0.1)


@given(st.floats(0, 1e6))
def test_steps_of_the_needed_size_make_that_rate(rate: float) -> None:
    cost = cost_of()
    size = cost.size_at_rate(rate)
    if math.isinf(size):
        assert rate * UNIT_S >= 1
    else:
        assert size == pytest.approx(rate * (STEP_S + UNIT_S * size), rel=1e-6, abs=1e-9)


# ------------------------------------------------------------- how much slack players have

STEPS, MAX_SIZE = 9, 3_072


def slack(step_s: float | None = None, max_size: int = MAX_SIZE) -> Slack:
    """Of nothing that was measured yet, or of a step."""
    cost = cost_of(1e-2, 1.05e-5)
    if step_s is not None:
        cost.observe(StepTime(72, step_s))
    return Slack(STEPS, max_size, PRIORS, cost, time.monotonic)


def test_a_round_costs_all_steps_of_a_piece_for_each_player_and_one_pass() -> None:
    of = slack(max_size=1_440)
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
    assert of.most_players() == 6 and of.round_s(6) <= PRIORS.cushion_s < of.round_s(7)
    assert (slack(step_s=1_000).most_players(), of.use()) == (1, 0)
    with of.player("first"), of.player("second"), of.player("third") as third:
        assert of.use() == 0.5
        third.deliver(60, time.monotonic())
        assert of.use() == pytest.approx(2 / 6)
    assert of.use() == 0
