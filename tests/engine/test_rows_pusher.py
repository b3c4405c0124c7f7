from __future__ import annotations

import asyncio

import pytest
import torch

from omni_cluster.engine.rows_pusher import RowsPusher
from omni_cluster.inputs import RowsPush
from omni_cluster.payloads import PromptEmbedsPayload


def push(key: str) -> RowsPush:
    return RowsPush(key, PromptEmbedsPayload.from_tensor(torch.zeros(1, 2)), complete=False)


class Engine:
    """Takes messages one at a time, each once its gate is opened."""

    def __init__(self) -> None:
        self.messages: list[list[str]] = []
        self.arrived = asyncio.Semaphore(0)
        self.gate = asyncio.Semaphore(0)
        self.errors: dict[int, Exception] = {}
        self.at_once = 0

    async def send(self, pushes: list[RowsPush]) -> None:
        self.messages.append([p.key for p in pushes])
        number = len(self.messages) - 1
        self.at_once += 1
        assert self.at_once == 1
        self.arrived.release()
        try:
            await self.gate.acquire()
        finally:
            self.at_once -= 1
        if number in self.errors:
            raise self.errors[number]


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def pusher(engine: Engine) -> RowsPusher:
    return RowsPusher(engine.send)


async def pushing(pusher: RowsPusher, *keys: str) -> list[asyncio.Task[None]]:
    """Pushes under way, in this order."""
    tasks = [asyncio.create_task(pusher.push(push(key))) for key in keys]
    await asyncio.sleep(0)
    return tasks


async def test_push_returns_when_the_engine_has_the_rows(engine: Engine, pusher: RowsPusher) -> None:
    (task,) = await pushing(pusher, "a")
    await engine.arrived.acquire()
    assert not task.done()
    engine.gate.release()
    await task
    assert engine.messages == [["a"]]


async def test_what_comes_while_a_message_is_under_way_leaves_as_one(engine: Engine, pusher: RowsPusher) -> None:
    first = await pushing(pusher, "a")
    await engine.arrived.acquire()
    later = await pushing(pusher, "b", "c", "d")
    engine.gate.release()
    await asyncio.gather(*first)
    await engine.arrived.acquire()
    assert not any(task.done() for task in later)
    engine.gate.release()
    await asyncio.gather(*later)
    assert engine.messages == [["a"], ["b", "c", "d"]]


async def test_rows_of_a_request_stay_in_order(engine: Engine, pusher: RowsPusher) -> None:
    async def all_of(key: str) -> None:
        for number in range(5):
            await pusher.push(push(f"{key}{number}"))

    for _ in range(100):
        engine.gate.release()
    await asyncio.gather(all_of("a"), all_of("b"), all_of("c"))
    sent = [key for message in engine.messages for key in message]
    for key in "abc":
        assert [k for k in sent if k.startswith(key)] == [f"{key}{number}" for number in range(5)]


async def test_engines_error_reaches_everyone_in_the_message_and_no_one_else(
    engine: Engine, pusher: RowsPusher
) -> None:
    engine.errors[1] = ValueError("refused")
    first = await pushing(pusher, "a")
    await engine.arrived.acquire()
    failing = await pushing(pusher, "b", "c", "d")
    engine.gate.release()
    await engine.arrived.acquire()
    after = await pushing(pusher, "e")
    engine.gate.release()
    engine.gate.release()
    results = await asyncio.gather(*first, *failing, *after, return_exceptions=True)
    assert [repr(r) for r in results] == ["None", *["ValueError('refused')"] * 3, "None"]
    assert engine.messages == [["a"], ["b", "c", "d"], ["e"]]


async def test_a_waiter_that_is_cancelled_loses_nobody_elses_rows(engine: Engine, pusher: RowsPusher) -> None:
    first = await pushing(pusher, "a")
    await engine.arrived.acquire()
    cancelled, kept = await pushing(pusher, "b", "c")
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    engine.gate.release()
    await asyncio.gather(*first)
    await engine.arrived.acquire()
    engine.gate.release()
    await kept
    assert "c" in engine.messages[1]


async def test_cancelling_the_one_whose_task_sends_loses_nobody_elses_rows(engine: Engine, pusher: RowsPusher) -> None:
    """The task that carries a message carries the rows of others too, who did not ask to be cancelled."""
    first = await pushing(pusher, "a")
    await engine.arrived.acquire()
    carrier, other = await pushing(pusher, "b", "c")
    engine.gate.release()
    await asyncio.gather(*first)
    await engine.arrived.acquire()
    carrier.cancel()
    engine.gate.release()
    engine.gate.release()
    results = await asyncio.gather(carrier, other, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1] is None


async def test_pusher_goes_on_after_a_cancelled_message(engine: Engine, pusher: RowsPusher) -> None:
    (cancelled,) = await pushing(pusher, "a")
    await engine.arrived.acquire()
    cancelled.cancel()
    engine.gate.release()
    await asyncio.gather(cancelled, return_exceptions=True)
    engine.gate.release()
    await pusher.push(push("b"))
    assert engine.messages[-1] == ["b"]
