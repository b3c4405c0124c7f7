"""Users who come back."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest

from omni_cluster.bench.conversation import converse, next_turn_s
from omni_cluster.bench.load import Load
from omni_cluster.bench.mix import Mix
from omni_cluster.bench.record import RequestRecord, Said
from tests.bench.records import CODES_PER_S, SECOND, Silent, record

CLOCK_S = 1e-6
"""What an event loop's clock may be off by."""


def test_the_next_turn_is_due_when_the_answer_was_heard_and_the_user_has_paused_and_spoken() -> None:
    load = Load(pause_s=0.5)
    early = dataclasses.replace(record(), total_s=3.1)  # a second of sound came at 1 s, the other at 3 s
    assert next_turn_s(load, early, 1) == pytest.approx(4.0 + 0.5)
    late = dataclasses.replace(record(), total_s=9.0)
    assert next_turn_s(load, late, 1) == pytest.approx(9.0 + 0.5)
    assert next_turn_s(load, RequestRecord(0, 2.0, sample_rate_hz=SECOND), 1) == pytest.approx(2.0 + 0.5)
    spoken = dataclasses.replace(load, mix=Mix(spoken_share=1.0, codes_per_s=CODES_PER_S))
    assert next_turn_s(spoken, early, 1) == pytest.approx(4.0 + 0.5 + spoken.lengths(1).spoken_s)
    assert sum(chunk.samples for chunk in early.audio) == 2 * SECOND


async def test_a_turn_that_failed_is_not_in_the_prompts_behind_it() -> None:
    server = Silent()

    async def ask(number: int, said: Sequence[Said] = ()) -> RequestRecord:
        answer = await server.ask(number, said)
        return dataclasses.replace(answer, error="no.") if number == 5 else answer

    records = await converse(ask, Load(pause_s=0.001), [4, 5, 6, 7])
    first, third = Said(4, "reply 4"), Said(6, "reply 6")
    assert server.said == [(), (first,), (first,), (first, third)]
    assert [each.number for each in records] == [4, 5, 6, 7]
    assert [each.error for each in records] == [None, "no.", None, None]


async def test_no_turn_is_early() -> None:
    server, pause_s, begin_s = Silent(), 0.03, asyncio.get_running_loop().time()
    await converse(server.ask, Load(pause_s=pause_s), [1, 2, 3])
    waited_s = [sent_s - begin_s for sent_s in server.sent_s]
    assert len(waited_s) == 3 and all(waited_s[turn] >= turn * pause_s - CLOCK_S for turn in range(3))


async def test_a_user_who_leaves_asks_no_more() -> None:
    server = Silent()
    talking = asyncio.create_task(converse(server.ask, Load(pause_s=600), [1, 2]))
    while not server.asked:
        await asyncio.sleep(0)
    talking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await talking
    assert server.asked == [1]
