"""What a request holds of an engine's cache before it is there is let go of, however it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omni_cluster.types.rows import PrefixHashes
from omni_cluster.vllm_engine.held_prefixes import PrefixHold

PREFIX = PrefixHashes(16, (bytes(32), bytes([1]) * 32))


class Engine:
    """It has one block. `answers`: whether calls come back."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def call(self, *words: Any) -> int:
        self.calls.append(words)
        await self.answers.wait()
        return 1


async def test_blocks_are_asked_for_in_positions_and_let_go_of_by_name() -> None:
    engine = Engine()
    hold = PrefixHold("r", engine.call)
    assert await hold.positions(PREFIX) == 16
    await hold.let_go()
    asked, released = engine.calls
    assert asked == ("omni_hold_prefix", hold.name, {"block_size": 16, "hashes": PREFIX.hashes})
    assert released == ("omni_release_prefix", hold.name)


async def test_a_client_that_leaves_before_the_answer_holds_nothing() -> None:
    engine = Engine()
    hold = PrefixHold("r", engine.call)
    engine.answers.clear()
    asking = asyncio.create_task(hold.positions(PREFIX))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    engine.answers.set()
    await hold.let_go()
    assert engine.calls[-1] == ("omni_release_prefix", hold.name)


async def test_a_request_that_is_there_lets_go_by_itself_and_one_that_asked_for_nothing_has_nothing() -> None:
    engine = Engine()
    there, idle = PrefixHold("r", engine.call), PrefixHold("r", engine.call)
    await there.positions(PREFIX)
    there.is_there = lambda: True
    await there.let_go()
    await idle.let_go()
    assert len(engine.calls) == 1 and there.name != idle.name
