from __future__ import annotations

import asyncio

import pytest

from omni_cluster.models import progress
from omni_cluster.models.progress import MAX_LAPSE_S, Probe, Progress, StallWatch
from omni_cluster.types.errors import StageDied

TIMEOUT_S = 10.0
LOOK_S = 2.0
"""Between two looks; several of them are the timeout."""
WORKING, IDLE = True, False


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> StallWatch:
    return StallWatch("talker", TIMEOUT_S, clock)


def looks(watch: StallWatch, clock: Clock, said: Progress | None, count: int) -> None:
    for _ in range(count):
        clock.now_s += LOOK_S
        watch.look(said)


def test_work_without_a_step_is_a_stall_after_the_timeout_and_not_before(watch: StallWatch, clock: Clock) -> None:
    looks(watch, clock, Progress(7, WORKING), 6)  # the first one is new
    with pytest.raises(StageDied, match=r"talker has taken no step for 12 s, and stall_timeout_s is 10"):
        looks(watch, clock, Progress(7, WORKING), 1)


def test_no_answer_is_a_stall_after_the_timeout_even_of_an_idle_engine(watch: StallWatch, clock: Clock) -> None:
    looks(watch, clock, Progress(7, IDLE), 3)
    looks(watch, clock, None, 5)
    with pytest.raises(StageDied, match="12 s"):
        looks(watch, clock, None, 1)


def test_without_work_of_its_own_an_engine_may_stand_still_for_ever(watch: StallWatch, clock: Clock) -> None:
    looks(watch, clock, Progress(7, IDLE), 1000)


def test_a_slow_engine_may_take_its_time_for_each_step(watch: StallWatch, clock: Clock) -> None:
    for step in range(100):
        looks(watch, clock, None, 2)
        looks(watch, clock, Progress(step, WORKING), 3)


def test_who_was_asked_too_rarely_has_not_stood_still_all_the_time(watch: StallWatch, clock: Clock) -> None:
    """A host that was suspended, or so busy that nobody could look, gave the engine no time either."""
    looks(watch, clock, Progress(7, WORKING), 1)
    clock.now_s += 100 * TIMEOUT_S
    watch.look(Progress(7, WORKING))
    assert 2 * MAX_LAPSE_S <= TIMEOUT_S
    clock.now_s += 100 * TIMEOUT_S
    watch.look(Progress(7, WORKING))
    looks(watch, clock, Progress(8, WORKING), 1)


class Engine:
    """Answers when its gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked = 0
        self.error: Exception | None = None

    async def progress(self) -> Progress:
        self.asked += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return Progress(self.asked, IDLE)


async def test_an_engine_that_does_not_answer_is_asked_once_and_waited_for_within_bounds(
    clock: Clock, watch: StallWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "ANSWER_S", 0.001)
    engine = Engine()
    asked = Probe(engine.progress, watch)
    for _ in range(5):
        clock.now_s += LOOK_S
        await asked.check()
    clock.now_s += LOOK_S
    with pytest.raises(StageDied):
        await asked.check()
    assert engine.asked == 1
    engine.gate.set()  # it was only slow
    await asyncio.sleep(0)
    for _ in range(10):
        clock.now_s += LOOK_S
        await asked.check()
    asked.close()


async def test_two_who_look_at_once_share_the_answer(clock: Clock, watch: StallWatch) -> None:
    engine = Engine()
    asked = Probe(engine.progress, watch)
    both = [asyncio.create_task(asked.check()) for _ in range(2)]
    await asyncio.sleep(0)
    engine.gate.set()
    await asyncio.gather(*both)
    assert engine.asked == 1


async def test_what_the_engine_answers_with_is_raised(watch: StallWatch) -> None:
    engine = Engine()
    engine.error = StageDied("gone")
    engine.gate.set()
    with pytest.raises(StageDied, match="gone"):
        await Probe(engine.progress, watch).check()


async def test_a_question_that_is_left_is_cancelled(watch: StallWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "ANSWER_S", 0.001)
    asked = Probe(Engine().progress, watch)
    await asked.check()
    asked.close()
    await asyncio.sleep(0)
    assert asked._question is not None and asked._question.cancelled()
