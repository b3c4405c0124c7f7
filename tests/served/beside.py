"""Clients that only ask while another one does what it should not: what they got, and how long it took."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median

import httpx

from tests.server.bad_inputs import CHAT, chat

MOST_BLOCKED_S = 0.5
"""An ingress stands still for no longer, whatever it is sent, and half of the streams begin sooner."""
MOST_LATE_S = 2.0
"""No stream begins later: its first words come from an engine, which shares the cores with all that is sent."""
TRIES = 3
"""In one of them a machine that others use has time for this."""
TICK_S = 0.005
MOST_TICK_S = 0.015
"""A loop that nothing keeps from running has its turn sooner."""
Harm = Callable[[httpx.AsyncClient], Awaitable[None]]
"""Sends what it is about, and says what has to come of it."""


class AwakeTime:
    """Seconds that pass while this process's own event loop has its turns: a server is blamed for these alone.

    The loop has none while it hands a body of 60 MB to the kernel, or while the machine runs something else.
    """

    def __init__(self) -> None:
        self._still_s = 0.0
        self._ticked_s = time.monotonic()

    def now_s(self) -> float:
        still_now_s = max(0.0, time.monotonic() - self._ticked_s - MOST_TICK_S)
        return time.monotonic() - self._still_s - still_now_s

    async def tick(self) -> None:
        while True:
            self._still_s += max(0.0, time.monotonic() - self._ticked_s - MOST_TICK_S)
            self._ticked_s = time.monotonic()
            await asyncio.sleep(TICK_S)


@dataclass
class Seen:
    """Texts of streams, and the seconds until their first words and until `/health` was answered."""

    time: AwakeTime = field(default_factory=AwakeTime)
    texts: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        first = f"first text {median(self.first_s):.3f} s, {max(self.first_s):.3f} s at most of {len(self.texts)}"
        return f"/health {max(self.health_s):.3f} s at most, {first}"

    def is_in_time(self, alone: Seen) -> bool:
        """Nobody waited for longer than these bounds, or twice as long as on this machine when quiet."""
        most_s = max(MOST_BLOCKED_S, 2 * max(alone.first_s))
        return (
            max(self.health_s) < max(MOST_BLOCKED_S, 2 * max(alone.health_s))
            and median(self.first_s) < most_s
            and max(self.first_s) < max(MOST_LATE_S, most_s)
        )


async def stream(client: httpx.AsyncClient, seen: Seen) -> None:
    """One answer of text, greedy, so that it is the same each time."""
    began_s, said, first_s = seen.time.now_s(), "", None
    body = chat(stream=True, max_tokens=24, temperature=0)
    async with client.stream("POST", CHAT, json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            said += "".join(choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"])
            if said and first_s is None:
                first_s = seen.time.now_s() - began_s
    assert first_s is not None, "no text came"
    seen.first_s.append(first_s)
    seen.texts.append(said)


async def probe(client: httpx.AsyncClient, seen: Seen) -> None:
    began_s = seen.time.now_s()
    assert (await client.get("/health")).status_code == 200
    seen.health_s.append(seen.time.now_s() - began_s)


async def quiet(client: httpx.AsyncClient, times: int = 5) -> Seen:
    """What they get while nobody else asks."""
    await stream(client, Seen())  # the first may wait for what is not yet there
    async with _ticking() as seen:
        for _ in range(times):
            await asyncio.gather(stream(client, seen), *(probe(client, seen) for _ in range(5)))
    return seen


@asynccontextmanager
async def _ticking() -> AsyncIterator[Seen]:
    seen = Seen()
    ticking = asyncio.create_task(seen.time.tick())
    try:
        yield seen
    finally:
        ticking.cancel()


@asynccontextmanager
async def asking_all_the_while(client: httpx.AsyncClient) -> AsyncIterator[Seen]:
    """A client that streams and one that asks for health, again and again."""
    ended = asyncio.Event()

    async def again(ask: Callable[[httpx.AsyncClient, Seen], Awaitable[None]]) -> None:
        while not ended.is_set():
            await ask(client, seen)

    async with _ticking() as seen, asyncio.TaskGroup() as group:
        group.create_task(again(stream))
        group.create_task(again(probe))
        try:
            yield seen
        finally:
            ended.set()


async def streams_beside(harm: Harm, client: httpx.AsyncClient) -> int:
    """How many streams others had, each of them exact; all in time, in one of several times on a busy machine."""
    alone = await quiet(client)
    (text,) = set(alone.texts)
    tried: list[Seen] = []
    while len(tried) < TRIES and not any(seen.is_in_time(alone) for seen in tried):
        async with asking_all_the_while(client) as seen:
            await harm(client)
        assert set(seen.texts) == {text}
        tried.append(seen)
    print(f"{harm.__name__}: quiet {alone}, beside {', '.join(map(str, tried))}")
    assert tried[-1].is_in_time(alone)
    return len(alone.texts) + 1 + sum(len(seen.texts) for seen in tried)
