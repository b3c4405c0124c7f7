"""A server of realtime sessions over a pipeline that says one word and a second of silence."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from omni_cluster.config.limits import Limits
from omni_cluster.serve_local import listening, serving
from tests.server.keyed import config_of
from tests.server.realtime.talk import Talk, talk
from tests.server.speaker import Speaker


class Room:
    """A server and its pipeline."""

    def __init__(self, speaker: Speaker, url: str) -> None:
        self.speaker, self.url = speaker, url


@asynccontextmanager
async def room(folder: Path, limits: Limits | None = None, **api: Any) -> AsyncIterator[Room]:
    speaker = Speaker(config_of(folder, limits, **api))
    with listening("127.0.0.1", 0) as listener:
        async with serving(speaker, listener) as server:
            yield Room(speaker, server.url)


@asynccontextmanager
async def talking(folder: Path, limits: Limits | None = None) -> AsyncIterator[tuple[Talk, Speaker]]:
    async with room(folder, limits) as there, talk(there.url) as client:
        assert (await client.next())["type"] == "session.created"
        yield client, there.speaker
