"""The clock that a server's slowness is told by."""

from __future__ import annotations

import asyncio
import time

from tests.served.beside import AwakeTime

WAIT_S = 0.2


async def took_s(waits_itself: bool) -> float:
    """As the clock tells it: a wait in which the loop runs, or one in which it stands still."""
    clock = AwakeTime()
    ticking = asyncio.create_task(clock.tick())
    await asyncio.sleep(0)
    began_s = clock.now_s()
    if waits_itself:
        await asyncio.sleep(WAIT_S)
    else:
        time.sleep(WAIT_S)
    took = clock.now_s() - began_s
    ticking.cancel()
    return took


async def test_a_wait_for_others_counts_and_standing_still_does_not() -> None:
    assert await took_s(waits_itself=False) < WAIT_S / 4
    # A busy machine may keep the loop from some of its turns.
    assert max([await took_s(waits_itself=True) for _ in range(5)]) > WAIT_S * 3 / 4
