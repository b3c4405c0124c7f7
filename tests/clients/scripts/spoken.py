"""What the scripts of realtime clients share: a microphone, and what the server counts. It needs no package."""

from __future__ import annotations

import asyncio
import urllib.request
import wave
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from told import ADDRESS, FOLDER

RATE_HZ = 24_000
PIECE_S = 0.1
PIECE_BYTES = int(PIECE_S * RATE_HZ) * 2
PATIENCE_S = 120
FIRST, SECOND = "first.wav", "second.wav"
LONG_TOKENS = 4_096
"""Of an answer that is to be interrupted: as many as the protocol has, and the server gives."""


class Microphone:
    """Sends pieces of 16-bit sound in real time: silence, and what is said."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send
        self._said = b""

    def say(self, name: str) -> None:
        """A file of the folder, from the next piece on."""
        with wave.open(str(FOLDER / name)) as file:
            assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE_HZ, 1, 2)
            self._said += file.readframes(file.getnframes())

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        next_s = clock()
        while True:
            piece, self._said = self._said[:PIECE_BYTES], self._said[PIECE_BYTES:]
            await self._send(piece.ljust(PIECE_BYTES, b"\0"))
            next_s += PIECE_S
            await asyncio.sleep(next_s - clock())


@asynccontextmanager
async def microphone(send: Callable[[bytes], Awaitable[None]]) -> AsyncIterator[Microphone]:
    """One that is on within the block."""
    it = Microphone(send)
    runs = asyncio.create_task(it.run())
    try:
        yield it
    finally:
        runs.cancel()
        await asyncio.wait([runs])


async def until(is_so: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0.02)


async def played(sound: bytes) -> None:
    """As long as a player plays it: clients take back what speech interrupts, also once all of it is there."""
    await asyncio.sleep(len(sound) / 2 / RATE_HZ)


def _counted(name: str, *labels: str) -> float:
    """The sum of the server's samples of a metric with these labels."""
    with urllib.request.urlopen(f"{ADDRESS}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    ours = (line for line in lines if line.startswith(name) and all(label in line for label in labels))
    return sum(float(line.split()[-1]) for line in ours)


async def cancelled() -> float:
    """How many requests ended in the thinker before it had made all of their answer."""
    labels = ('stage="thinker"', 'outcome="cancelled"')
    return await asyncio.to_thread(_counted, "omni_cluster_stage_requests_total", *labels)


async def no_session_is_open() -> None:
    """The server has seen that the client has left."""
    async with asyncio.timeout(PATIENCE_S):
        while await asyncio.to_thread(_counted, "omni_cluster_ingress_sessions"):
            await asyncio.sleep(0.1)
