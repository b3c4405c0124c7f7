"""What tests say to a session, and how they wait for it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import numpy as np

from omni_cluster.bench.realtime import recording
from tests.server.realtime.talk import Talk
from tests.server.speaker import RATE_HZ

PATIENCE_S = 60


def sentences() -> tuple[np.ndarray, np.ndarray]:
    """Each in samples of 16 bits."""
    samples = recording().samples
    loud = np.convolve(np.abs(samples.astype(float)), np.ones(RATE_HZ // 20) / (RATE_HZ // 20), "same") > 60
    quiet = np.flatnonzero(~loud[RATE_HZ // 4 : -RATE_HZ // 4]) + RATE_HZ // 4
    return samples[: quiet[0]], samples[quiet[-1] :]


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * RATE_HZ), np.int16)


async def listening(client: Talk, **detection: Any) -> None:
    await client.update(audio={"input": {"turn_detection": {"type": "server_vad", **detection}}})


async def speak(client: Talk, *parts: np.ndarray, piece_s: float = 0.1) -> None:
    """As fast as it goes: all is measured in sound."""
    samples = np.concatenate(parts)
    step = int(piece_s * RATE_HZ)
    for start in range(0, len(samples), step):
        data = base64.b64encode(samples[start : start + step].tobytes()).decode()
        await client.send("input_audio_buffer.append", audio=data)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0.01)
