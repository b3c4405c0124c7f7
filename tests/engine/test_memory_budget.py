"""How much a replica holds of all its requests, and who may begin then."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import torch

from omni_cluster.engine.output_log import OutputLogs
from omni_cluster.types.outputs import StageChunk
from tests.rows import rows_of

ROW_BYTES = 16


def rows(start: int, count: int) -> StageChunk:
    return StageChunk(rows=rows_of(start, torch.zeros(count, ROW_BYTES // 4)))


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Work:
    """A stage with its logs. Each request makes as many rows as it is told, and stays until it is let go."""

    def __init__(self, most_rows: int) -> None:
        self.logs = OutputLogs(1 << 20, most_rows * ROW_BYTES)
        self.begun: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def asks(self, name: str, count: int) -> None:
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._work(name, count))
        await settled()

    async def _work(self, name: str, count: int) -> None:
        log = self.logs.open(name)
        try:
            async with self.logs.budget.taken(log):
                self.begun.append(name)
                for start in range(count):
                    log.put(rows(start, 1))
            log.close()
            await self._ends[name].wait()
        finally:
            self.logs.remove(name)

    async def lets_go(self, name: str) -> None:
        self._ends[name].set()
        await self._tasks[name]
        await settled()

    async def leaves(self, name: str) -> None:
        self._tasks[name].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._tasks[name]
        await settled()


async def test_at_the_bound_new_requests_wait_in_turn_and_those_that_run_go_on() -> None:
    work = Work(most_rows=10)
    await work.asks("a", 4)
    await work.asks("b", 8)  # there is room when it begins, and it makes all it has to make
    assert work.logs.budget.held_bytes == 12 * ROW_BYTES
    for name in ("c", "d", "e"):
        await work.asks(name, 2)
    assert work.begun == ["a", "b"] and len(work.logs) == 5
    await work.leaves("c")
    await work.lets_go("a")
    assert work.begun == ["a", "b", "d"]  # 8 of 10 were held, and now 10 are
    await work.lets_go("b")
    assert work.begun == ["a", "b", "d", "e"]
    await work.lets_go("d")
    await work.lets_go("e")
    assert work.logs.budget.held_bytes == 0 and len(work.logs) == 0


async def test_many_that_begin_at_once_are_taken_for_what_others_made() -> None:
    work = Work(most_rows=80)
    for number in range(40):
        await work.asks(f"before {number}", 20)
        await work.lets_go(f"before {number}")
    budget = work.logs.budget
    async with contextlib.AsyncExitStack() as running:
        for number in range(4):
            await running.enter_async_context(budget.taken(work.logs.open(f"r{number}")))
        assert budget.held_bytes == 0
        fifth = asyncio.create_task(running.enter_async_context(budget.taken(work.logs.open("r4"))))
        await settled()
        assert not fifth.done()
        work.logs.get("r0").put(rows(0, 20))  # what was expected of it
        await settled()
        assert not fifth.done()
        work.logs.remove("r0")
        fifth.cancel()


@pytest.mark.parametrize("count", [1, 100])
async def test_a_request_that_is_alone_always_begins(count: int) -> None:
    work = Work(most_rows=10)
    for number in range(20):
        await work.asks(f"r{number}", count)
        await work.lets_go(f"r{number}")
    assert len(work.begun) == 20


async def test_what_breaks_takes_no_room() -> None:
    logs = OutputLogs(1 << 20, ROW_BYTES)
    for _ in range(3):
        with pytest.raises(ValueError, match="broke"):
            async with logs.budget.taken(log := logs.open("r")):
                log.put(rows(0, 1))
                raise ValueError("broke")
        assert logs.budget.held_bytes == ROW_BYTES
        logs.remove("r")
        assert logs.budget.held_bytes == 0
