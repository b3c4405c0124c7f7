"""Several streams at once: as they come, and none is left when one fails or the reader leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from omni_cluster.engine.answer import AnswerProgress
from omni_cluster.engine.fan_in import StageEvent
from omni_cluster.server.streamed import AnswerStream, gathered, merged
from omni_cluster.types.outputs import StageChunk, TokenCounts


class Source:
    """Says its items when they are let go."""

    def __init__(self, *items: str, fails: bool = False) -> None:
        self._items, self._fails = items, fails
        self.may_go_on = asyncio.Event()
        self.is_closed = False

    async def stream(self) -> AsyncGenerator[str, None]:
        try:
            for item in self._items:
                yield item
                await self.may_go_on.wait()
            if self._fails:
                raise ValueError("broke")
        finally:
            self.is_closed = True


async def test_what_comes_first_is_said_first() -> None:
    slow, fast = Source("a", "b"), Source("1", "2", "3")
    fast.may_go_on.set()
    said = merged([slow.stream(), fast.stream()])
    first = [await anext(said) for _ in range(4)]
    assert sorted(first) == ["1", "2", "3", "a"]
    slow.may_go_on.set()
    assert [item async for item in said] == ["b"]
    assert slow.is_closed and fast.is_closed


@pytest.mark.parametrize("others", [0, 2])
async def test_one_that_fails_ends_all(others: int) -> None:
    broken, rest = Source("x", fails=True), [Source("y") for _ in range(others)]
    broken.may_go_on.set()
    with pytest.raises(ValueError, match="broke"):
        async for _ in merged([broken.stream(), *(each.stream() for each in rest)]):
            pass
    assert all(each.is_closed for each in (broken, *rest))


async def test_a_reader_who_leaves_ends_all() -> None:
    sources = [Source("x"), Source("y"), Source("z")]
    said = merged([each.stream() for each in sources])
    for _ in sources:
        await anext(said)
    await said.aclose()
    assert all(each.is_closed for each in sources)


async def test_works_at_once_end_with_the_first_that_fails() -> None:
    ended = asyncio.Event()

    async def waits() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    async def fails() -> str:
        await asyncio.sleep(0)
        raise ValueError("broke")

    with pytest.raises(ValueError, match="broke"):
        await gathered([waits(), fails()])
    assert ended.is_set()


async def test_an_answer_s_first_chunk_is_read_ahead_and_each_is_counted_once() -> None:
    seen, closed = list[str](), asyncio.Event()

    async def events() -> AsyncGenerator[StageEvent, None]:
        try:
            for number in range(3):
                yield StageEvent("thinker", StageChunk(number, (number,), "abc"[number]))
        finally:
            closed.set()

    answer = AnswerStream(events(), AnswerProgress({"thinker": "text"}), lambda event: seen.append(event.chunk.text))
    await answer.begin()
    assert (seen, answer.progress.counts) == (["a"], TokenCounts(prompt=0, text=1, codec=0))
    said = [(await anext(answer)).text for _ in range(2)]
    await answer.aclose()
    assert (said, seen, answer.progress.counts.text) == (["a", "b"], ["a", "b"], 2)
    assert closed.is_set() and [chunk async for chunk in answer] == []


async def test_an_answer_that_breaks_at_its_first_chunk_is_ended_in_every_stage() -> None:
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[StageEvent, None]:
        try:
            yield StageEvent("unknown", StageChunk())
        finally:
            closed.set()

    with pytest.raises(KeyError):
        await AnswerStream(events(), AnswerProgress({"thinker": "text"})).begin()
    assert closed.is_set()
