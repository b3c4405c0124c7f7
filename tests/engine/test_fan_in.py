"""Several producers as one stream: order, failure, deadline, and the bound on what may wait."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import torch

from omni_cluster.engine.deadline import Deadline, DeadlineExceeded
from omni_cluster.engine.fan_in import MAX_WAITING_EVENTS, Emit, FanIn, StageEvent
from omni_cluster.types.outputs import StageChunk
from tests.rows import rows_of

LONG_S = 60.0


def event(stage: str, number: int = 0) -> StageEvent:
    return StageEvent(stage, StageChunk(number, (7,)))


class Producer:
    """Emits so many events, then waits for ever or ends; tells whether it was cancelled."""

    def __init__(self, stage: str, count: int, *, stays: bool = False) -> None:
        self.stage, self.count, self.stays = stage, count, stays
        self.emitted, self.cancelled = 0, False

    async def __call__(self, emit: Emit) -> None:
        try:
            for number in range(self.count):
                await emit(event(self.stage, number))
                self.emitted += 1
            if self.stays:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def failing(emit: Emit) -> None:
    await emit(event("failing"))
    raise KeyError("broken")


async def test_all_events_come_each_producers_in_its_order() -> None:
    run = FanIn(Deadline(LONG_S))
    for stage in ("a", "b"):
        run.add(Producer(stage, 5))
    seen = [e async for e in run.events()]
    for stage in ("a", "b"):
        assert [e.chunk.token_start for e in seen if e.stage == stage] == list(range(5))


async def test_chunks_that_only_hand_rows_on_are_no_events() -> None:
    async def computing(emit: Emit) -> None:
        rows = rows_of(0, torch.zeros(2, 3))
        for chunk in (StageChunk(rows=rows), StageChunk(0, (7,), rows=rows), StageChunk(), StageChunk(1, text="b")):
            await emit(StageEvent("thinker", chunk))
        await emit(StageEvent("thinker", StageChunk(1, finish_reason="stop")))

    run = FanIn(Deadline(LONG_S))
    run.add(computing)
    said = [e.chunk async for e in run.events()]
    assert [(chunk.token_ids, chunk.text, chunk.finish_reason) for chunk in said] == [
        ((7,), "", None),
        ((), "b", None),
        ((), "", "stop"),
    ]


async def test_without_producers_there_are_no_events() -> None:
    assert [e async for e in FanIn(Deadline(LONG_S)).events()] == []


async def test_the_first_failure_is_raised_and_ends_the_others() -> None:
    run, other = FanIn(Deadline(LONG_S)), Producer("other", 1, stays=True)
    run.add(other)
    run.add(failing)
    seen = []
    with pytest.raises(KeyError, match="broken"):
        async for e in run.events():
            seen.append(e.stage)
    assert sorted(seen) == ["failing", "other"]
    assert other.cancelled


async def test_the_deadline_ends_all_and_names_its_limit() -> None:
    run, slow = FanIn(Deadline(0.05)), Producer("slow", 1, stays=True)
    run.add(slow)
    with pytest.raises(DeadlineExceeded, match=r"request_timeout_s = 0\.05"):
        async for _ in run.events():
            pass
    assert slow.cancelled


async def test_closing_early_leaves_no_producer_running() -> None:
    run, one = FanIn(Deadline(LONG_S)), Producer("one", 3, stays=True)
    run.add(one)
    async with contextlib.aclosing(run.events()) as events:
        await anext(events)
    assert one.cancelled


async def test_a_reader_that_lags_by_more_than_the_bound_stops_the_producer_until_it_goes_on() -> None:
    run, eager = FanIn(Deadline(LONG_S)), Producer("eager", MAX_WAITING_EVENTS + 10)
    run.add(eager)
    async with contextlib.aclosing(run.events()) as events:
        await anext(events)
        while eager.emitted < MAX_WAITING_EVENTS:
            await asyncio.sleep(0)
        for _ in range(100):  # time in plenty to go on, were it not held
            await asyncio.sleep(0)
        assert eager.emitted <= MAX_WAITING_EVENTS + 1
        rest = [e async for e in events]
    assert len(rest) == eager.count - 1
