"""Mutated inputs, the same ones each time: 2,000, of all tests 20,000; `make fuzz` runs a million."""

from __future__ import annotations

import json

import pytest

from omni_cluster.models.prompts import LONG_CHARS
from tests.fuzz.bodies import take_chat
from tests.fuzz.driver import MOST_BLOCKED_S, MOST_MB, Findings, Plan, fuzz, run_one
from tests.fuzz.hostile import MODEL
from tests.fuzz.kinds import KINDS

EVERY_KIND = 20_000
"""So many that of each kind one is whole enough to be taken."""


@pytest.mark.parametrize("count", [2_000, pytest.param(EVERY_KIND, marks=pytest.mark.full)])
def test_no_mutated_input_breaks_what_takes_it(count: int) -> None:
    findings = fuzz(count, Plan(0, sorted(KINDS)), workers=1)
    assert not findings.crashes and findings.count == count
    assert findings.is_within_bounds, (findings.peak_mb, findings.slowest_s)
    assert set(findings.refused) == set(KINDS)
    if count == EVERY_KIND:
        assert set(findings.taken) == set(KINDS)  # none is refused at the door


def test_an_input_is_made_again_from_its_number() -> None:
    plan = Plan(1, sorted(KINDS))
    assert [plan.input(n) for n in range(50)] == [plan.input(n) for n in range(50)]
    assert plan.input(3) != Plan(2, sorted(KINDS)).input(3)


def test_what_breaks_is_told_with_its_number() -> None:
    findings = Findings()
    run_one(7, Plan(0, ["broken"], "tests.fuzz.broken"), findings)
    assert len(findings.crashes) == findings.count == 1
    assert findings.crashes[0].startswith("input 7 of seed 0 (broken): ") and "ZeroDivisionError" in findings.crashes[0]


def test_a_long_text_without_a_mark_breaks_nothing() -> None:
    long = {"model": MODEL, "messages": [{"role": "user", "content": "x" * (LONG_CHARS + 1)}]}
    take_chat(json.dumps(long).encode())


def test_what_costs_too_much_is_out_of_bounds() -> None:
    assert Findings(peak_mb=MOST_MB - 1, slowest_s={"chat": (MOST_BLOCKED_S / 2, 7)}).is_within_bounds
    assert not Findings(peak_mb=MOST_MB).is_within_bounds
    assert not Findings(slowest_s={"chat": (MOST_BLOCKED_S, 7), "wav": (0.1, 8)}).is_within_bounds


def test_what_ends_its_process_is_told_and_the_rest_is_run() -> None:
    plan = Plan(0, ["deadly"], "tests.fuzz.broken")
    deadly = [n for n in range(4) if plan.input(n)[0] % 2]
    findings = fuzz(4, plan, workers=1)
    assert [crash.split()[1] for crash in findings.crashes] == [str(n) for n in deadly]
    assert deadly and findings.count == 4
