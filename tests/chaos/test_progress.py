"""What a soak says while it runs."""

from __future__ import annotations

from tests.chaos.breaker import Break
from tests.chaos.clients import Outcome
from tests.chaos.progress import Progress


def test_each_break_and_each_wrong_answer_is_told_once() -> None:
    outcomes, breaks, said = [Outcome("greedy", "exact")], [], list[str]()
    progress = Progress(outcomes, breaks, said.append)
    progress.tell()
    outcomes += [Outcome("speech", "lost", "no answer"), Outcome("greedy", "exact")]
    breaks.append(Break(3.0, "talker", "engine killed", 0.0))
    progress.tell()
    progress.tell()
    assert [line.partition(" s: ")[2] for line in said] == [
        "1 exact",
        "engine killed: talker",
        "lost: speech: no answer",
        "2 exact, 1 lost",
        "2 exact, 1 lost",
    ]


def test_a_soak_without_any_answer_says_so() -> None:
    said = list[str]()
    Progress([], [], said.append).tell()
    assert said[0].endswith("no request has ended")
