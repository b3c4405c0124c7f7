from __future__ import annotations

import asyncio

import pytest
import torch

from omni_cluster.types.errors import PayloadError
from omni_cluster.types.inputs import RowsPush
from omni_cluster.vllm_engine.rows_pusher import MAX_MESSAGES, MAX_PUSHES, PushWindow, Refusals, RowsPusher, Sent
from tests.rows import rows_of


def push(key: str) -> RowsPush:
    return RowsPush(key, rows_of(0, torch.zeros(1, 2)).to_bytes(), complete=False)


class Engine:
    """Takes messages, and answers each once its gate is opened."""

    def __init__(self) -> None:
        self.messages: list[list[str]] = []
        self.arrived = asyncio.Semaphore(0)
        self.gate = asyncio.Semaphore(0)
        self.errors: dict[int, Exception] = {}
        self.refused: dict[str, str] = {}

    async def send(self, pushes: list[RowsPush]) -> Refusals:
        number = len(self.messages)
        self.messages.append([p.key for p in pushes])
        self.arrived.release()
        await self.gate.acquire()
        if number in self.errors:
            raise self.errors[number]
        return [self.refused.get(p.key) for p in pushes]

    def answer(self, count: int) -> None:
        for _ in range(count):
            self.gate.release()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def pusher(engine: Engine) -> RowsPusher:
    return RowsPusher(engine.send)


def put(pusher: RowsPusher, *keys: str) -> list[Sent]:
    return [pusher.put(push(key)) for key in keys]


async def test_rows_have_arrived_when_the_engine_answers(engine: Engine, pusher: RowsPusher) -> None:
    (sent,) = put(pusher, "a")
    await engine.arrived.acquire()
    assert not sent.done()
    engine.answer(1)
    await sent
    assert engine.messages == [["a"]]


async def test_what_comes_together_leaves_as_one_and_waits_for_no_answer(engine: Engine, pusher: RowsPusher) -> None:
    first = put(pusher, "a", "b")
    await engine.arrived.acquire()
    later = put(pusher, "c", "d", "e")
    await engine.arrived.acquire()
    assert engine.messages == [["a", "b"], ["c", "d", "e"]]
    assert not any(sent.done() for sent in first + later)
    engine.answer(2)
    await asyncio.gather(*first, *later)


async def test_messages_under_way_are_bounded_and_the_rest_leaves_as_one(engine: Engine, pusher: RowsPusher) -> None:
    sent = []
    for number in range(MAX_MESSAGES):
        sent += put(pusher, str(number))
        await engine.arrived.acquire()
    sent += put(pusher, "x")
    sent += put(pusher, "y")
    engine.answer(1)
    await engine.arrived.acquire()
    assert engine.messages[MAX_MESSAGES:] == [["x", "y"]]
    engine.answer(MAX_MESSAGES)
    await asyncio.gather(*sent)


async def test_rows_of_a_request_stay_in_order(engine: Engine, pusher: RowsPusher) -> None:
    async def all_of(key: str) -> None:
        window = PushWindow(pusher)
        for number in range(3 * MAX_PUSHES):
            await window.push(push(f"{key}{number}"))
        await window.all_arrived()

    engine.answer(1000)
    await asyncio.gather(all_of("a"), all_of("b"), all_of("c"))
    sent = [key for message in engine.messages for key in message]
    for key in "abc":
        assert [k for k in sent if k.startswith(key)] == [f"{key}{number}" for number in range(3 * MAX_PUSHES)]


async def test_a_window_holds_its_request_back_at_the_bound(engine: Engine, pusher: RowsPusher) -> None:
    window = PushWindow(pusher)
    for number in range(MAX_PUSHES):
        await window.push(push(str(number)))
    one_more = asyncio.create_task(window.push(push("one more")))
    await engine.arrived.acquire()
    assert engine.messages == [[str(number) for number in range(MAX_PUSHES)]] and not one_more.done()
    engine.answer(2)
    await one_more
    await window.all_arrived()
    assert engine.messages[1] == ["one more"]


async def test_engines_error_reaches_everyone_in_the_message_and_no_one_else(
    engine: Engine, pusher: RowsPusher
) -> None:
    engine.errors[1] = ValueError("refused")
    sent = []
    for keys in ("a", "bcd", "e"):
        sent += put(pusher, *keys)
        await engine.arrived.acquire()
    engine.answer(3)
    results = await asyncio.gather(*sent, return_exceptions=True)
    assert [repr(r) for r in results] == ["None", *["ValueError('refused')"] * 3, "None"]


async def test_rows_that_are_refused_fail_alone_in_their_message(engine: Engine, pusher: RowsPusher) -> None:
    engine.refused["b"] = "Rows of b have a gap."
    sent = put(pusher, "a", "b", "c")
    engine.answer(1)
    taken, refused, also_taken = await asyncio.gather(*sent, return_exceptions=True)
    assert len(engine.messages) == 1 and taken is None and also_taken is None
    assert isinstance(refused, PayloadError) and str(refused) == "Rows of b have a gap."


async def test_a_window_raises_what_an_earlier_push_met(engine: Engine, pusher: RowsPusher) -> None:
    engine.errors[0] = ValueError("refused")
    window = PushWindow(pusher)
    await window.push(push("a"))
    engine.answer(2)
    with pytest.raises(ValueError, match="refused"):
        await window.all_arrived()


async def test_one_who_leaves_loses_nobody_elses_rows(engine: Engine, pusher: RowsPusher) -> None:
    left, kept = put(pusher, "a", "b")
    left.cancel()
    await engine.arrived.acquire()
    engine.answer(1)
    await kept
    assert "b" in engine.messages[0] and left.cancelled()


async def test_pusher_goes_on_after_it_was_idle(engine: Engine, pusher: RowsPusher) -> None:
    engine.answer(2)
    await asyncio.gather(*put(pusher, "a"))
    await asyncio.gather(*put(pusher, "b"))
    assert engine.messages == [["a"], ["b"]]
