"""The autoscaling policy: each signal, both directions, bounds and sleep; and that it never flutters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_cluster.planning.policy import Decision, Sample, StageLoad, StageRule, decide

TICK_S = 10.0


def follow(
    rule: StageRule, loads: Sequence[StageLoad], start: int = 1, tick_s: float = TICK_S
) -> list[int]:  # replicas after each load
    decision, seen = Decision({"a": start}), []
    for turn, load in enumerate(loads):
        decision = decide({"a": rule}, decision, turn * tick_s, {"a": load})
        seen.append(decision.replicas["a"])
    return seen


def load(replicas: int = 1, **signals: float) -> StageLoad:
    return StageLoad(replicas=replicas, **signals)


@pytest.mark.parametrize(
    ("rule", "busy"),
    [
        ({"max_requests": 16}, {"running": 30, "waiting": 18}),
        ({"max_kv_use": 0.8, "max_streams": 999}, {"kv_use": 2.4}),
        ({"max_backlog_tokens": 8_000}, {"backlog_tokens": 24_000}),
        ({"max_slack_use": 0.7}, {"slack_use": 2.1}),
    ],
)
def test_each_signal_moves_its_stage_up_and_down(rule: dict[str, float], busy: dict[str, float]) -> None:
    rules = StageRule(max_replicas=8, up_after_s=0, down_after_s=50, **rule)  # type: ignore[arg-type]
    seen = follow(rules, [load(**busy)] * 3 + [load()] * 10)
    assert seen[:3] == [3, 3, 3]
    assert seen[-1] == 1


def test_the_signal_that_wants_the_most_counts_and_one_without_a_target_does_not() -> None:
    rule = StageRule(max_replicas=9, max_requests=10, max_kv_use=0.5)
    assert rule.need(load(running=10, waiting=10, kv_use=1.5, slack_use=99)) == 3


def test_samples_of_replicas_are_summed() -> None:
    both = StageLoad.of([Sample(running=3, waiting=1, kv_use=0.5), Sample(running=4, slack_use=0.1)])
    assert both == StageLoad(replicas=2, running=7, waiting=1, kv_use=0.5, slack_use=0.1)


def test_a_moment_of_load_moves_nothing_and_a_lasting_one_does() -> None:
    rule = StageRule(max_replicas=8, max_requests=10, up_after_s=20)
    busy, idle = load(waiting=40), load(running=5)
    assert follow(rule, [idle, busy, idle, busy, idle]) == [1, 1, 1, 1, 1]
    assert follow(rule, [idle, busy, busy, busy]) == [1, 1, 1, 4]


def test_a_stage_shrinks_to_the_most_that_was_needed_lately() -> None:
    rule = StageRule(max_replicas=8, max_requests=10, up_after_s=0, down_after_s=40, spare=0)
    waves = [load(waiting=60), *[load(waiting=10), load(waiting=30)] * 4]
    seen = follow(rule, waves)
    assert seen[:5] == [6, 6, 6, 6, 6]
    assert seen[5:] == [3, 3, 3, 3]


def test_replicas_stay_within_their_bounds() -> None:
    rule = StageRule(min_replicas=2, max_replicas=4, max_requests=1, up_after_s=0, down_after_s=0)
    assert follow(rule, [load(waiting=99), load()], start=2) == [4, 2]


def test_while_nobody_reports_nothing_changes() -> None:
    rule = StageRule(max_replicas=8, max_requests=10, up_after_s=0, down_after_s=0)
    assert follow(rule, [StageLoad()] * 3, start=5) == [5, 5, 5]


def test_a_stage_that_may_sleep_does_and_wakes_at_once() -> None:
    rule = StageRule(min_replicas=0, max_replicas=8, max_requests=10, up_after_s=30, down_after_s=20)
    seen = follow(rule, [load(), load(), load(), StageLoad(), StageLoad(waiting=25), load(3, running=25)])
    assert seen == [1, 1, 0, 0, 3, 3]


def test_a_stage_sleeps_only_when_it_has_no_request_whatever_that_waits_for() -> None:
    rule = StageRule(min_replicas=0, max_replicas=8, max_backlog_tokens=100, up_after_s=0, down_after_s=20)
    assert follow(rule, [*[load(open_logs=1)] * 4, load(), load(), load()]) == [1, 1, 1, 1, 1, 1, 0]


def test_a_stage_that_was_woken_does_not_sleep_for_what_was_wanted_before() -> None:
    rule = StageRule(min_replicas=0, max_replicas=8, max_requests=10, down_after_s=20)
    asleep = decide({"a": rule}, Decision({"a": 1}, {"a": ((0.0, 0),)}), 20.0, {"a": load()})
    assert asleep.replicas == {"a": 0}
    decision, seen = Decision({"a": 1}, asleep.wishes), []
    for at_s in (21.0, 40.0, 41.0):  # it reports before its first request has come
        decision = decide({"a": rule}, decision, at_s, {"a": load()})
        seen.append(decision.replicas["a"])
    assert seen == [1, 1, 0]


def test_running_streams_keep_their_replicas_whatever_the_load_says() -> None:
    rule = StageRule(max_replicas=8, max_streams=10, max_slack_use=1, up_after_s=0, down_after_s=0)
    assert follow(rule, [load(4, running=35)], start=4) == [4]
    assert follow(rule, [load(4, kv_use=2.5)], start=4) == [3]


signals = st.fixed_dictionaries(
    {"running": st.integers(0, 300), "waiting": st.integers(0, 300), "kv_use": st.floats(0, 8)}
)
rules_drawn = st.builds(
    StageRule,
    max_replicas=st.integers(2, 12),
    min_replicas=st.integers(0, 2),
    max_streams=st.integers(8, 64),
    max_requests=st.integers(1, 64),
    max_kv_use=st.floats(0.1, 1.0),
    up_after_s=st.sampled_from([0.0, 10.0, 30.0]),
    down_after_s=st.sampled_from([0.0, 20.0, 100.0]),
    spare=st.floats(0, 0.5),
)


@settings(max_examples=150, deadline=None)
@given(rule=rules_drawn, given_signals=signals, start=st.integers(0, 12))
def test_a_constant_load_moves_a_stage_one_way_and_then_not_at_all(
    rule: StageRule, given_signals: dict[str, float], start: int
) -> None:
    start = min(max(start, rule.min_replicas), rule.max_replicas)
    seen = [start, *follow(rule, [load(**given_signals)] * 30, start)]
    assert seen in (sorted(seen), sorted(seen, reverse=True))
    assert len(set(seen[-10:])) == 1


@settings(max_examples=100, deadline=None)
@given(usual=st.floats(1, 40), noise=st.lists(st.floats(-0.1, 0.1), min_size=5, max_size=30))
def test_a_load_that_trembles_by_a_tenth_never_takes_a_replica_away(usual: float, noise: list[float]) -> None:
    rule = StageRule(max_replicas=99, max_requests=1, up_after_s=0, down_after_s=0)
    seen = follow(rule, [load(running=usual * (1 + part)) for part in noise])
    assert seen == sorted(seen)


@settings(max_examples=150, deadline=None)
@given(rule=rules_drawn, series=st.lists(signals, min_size=1, max_size=20))
def test_no_load_takes_the_replicas_that_running_streams_need(rule: StageRule, series: list[dict[str, float]]) -> None:
    loads = [load(**each) for each in series]
    for replicas, there in zip(follow(rule, loads), loads, strict=True):
        assert replicas >= min(rule.max_replicas, there.running / rule.max_streams, there.kv_use)
        assert rule.min_replicas <= replicas <= rule.max_replicas


def test_a_replica_says_its_signals() -> None:
    counts = {"running": 5, "waiting": 4, "held": 3, "kv_blocks_used": 10, "kv_blocks": 40, "slack_percent": 50}
    sample = {"running": 5, "waiting": 1, "kv_use": 0.25, "backlog_tokens": 70.0, "slack_use": 0.5}
    assert asdict(Sample.of_replica(counts, 70.0, open_logs=9)) == {**sample, "open_logs": 9}


@pytest.mark.parametrize(
    ("running", "waiting", "held", "streams", "requests"),
    [(0, 0, 0, 2, 2), (3, 0, 2, 1, 1), (1, 2, 2, 1, 1), (4, 0, 0, 0, 4), (4, 2, 0, 0, 6), (4, 1, 2, 1, 3)],
)
def test_a_sound_stage_counts_requests_and_not_their_jobs(
    running: int, waiting: int, held: int, streams: int, requests: int
) -> None:
    counts = {"running": running, "waiting": waiting, "held": held, "streams": streams}
    said = Sample.of_replica(counts, 0, 0)
    assert said.running + said.waiting == requests
