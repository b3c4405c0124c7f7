"""Streams that are begun, and stay open."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.server.speaker import Face

SPOKEN: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "pcm16"}}


async def begun(face: Face, count: int) -> None:
    async with asyncio.timeout(60):
        while len(face.speaker.begun) < count:
            await asyncio.sleep(0)
