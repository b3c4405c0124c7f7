"""A server of realtime sessions over a pipeline that says one word and a second of silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn

from omni_cluster.config.limits import Limits
from omni_cluster.serve_local import listening, serving
from omni_cluster.server.app import HttpServer
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


@asynccontextmanager
async def closable(folder: Path) -> AsyncIterator[tuple[HttpServer, Speaker, str]]:
    """A server, its pipeline and its URL, where what listens goes on after the server let all end."""
    speaker = Speaker(config_of(folder))
    http = HttpServer(speaker)
    with listening("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(http.app(), lifespan="off", log_config=None))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield http, speaker, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
            await http.close()
