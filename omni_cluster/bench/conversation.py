"""Conversations: each user asks again once the answer has been played, with all that was said in the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from omni_cluster.bench.load import Load
from omni_cluster.bench.player import ends_at_s
from omni_cluster.bench.record import Ask, RequestRecord, Said


async def converse(ask: Ask, load: Load, numbers: Sequence[int]) -> list[RequestRecord]:
    """The turns of one user, one after another. One that fails is not in the prompts of those behind it."""
    said: list[Said] = []
    records: list[RequestRecord] = []
    loop = asyncio.get_running_loop()
    asked_s = 0.0
    for number in numbers:
        if records:
            await asyncio.sleep(asked_s + next_turn_s(load, records[-1], number) - loop.time())
        asked_s = loop.time()
        records.append(await ask(number, said))
        if records[-1].error is None:
            said = [*said, Said(number, records[-1].reply)]
    return records


def next_turn_s(load: Load, before: RequestRecord, number: int) -> float:
    """When request `number` is sent, seconds since the one before it was: the user hears, pauses, and speaks."""
    heard_s = max(before.total_s, ends_at_s(before.audio, before.sample_rate_hz))
    return heard_s + load.pause_s + load.lengths(number).spoken_s
