"""A relay before a realtime server: a client that is told its address says and hears the same, and it is kept."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from websockets.asyncio.client import connect
from websockets.asyncio.connection import Connection
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

Event = dict[str, Any]
TEXT, SOUND = "response.output_audio_transcript.delta", "response.output_audio.delta"


class Relay:
    """What went each way, as events. `url`: what the client is told."""

    def __init__(self, server: str) -> None:
        self._server = server.replace("http", "ws", 1)
        self.url = ""
        self.sent: list[Event] = []
        self.told: list[Event] = []

    async def pass_on(self, client: ServerConnection) -> None:
        assert client.request is not None
        sent = client.request.headers
        key = {"Authorization": sent["Authorization"]} if "Authorization" in sent else {}
        async with connect(f"{self._server}{client.request.path}", additional_headers=key, max_size=None) as server:
            ways = (_pump(client, server, self.sent), _pump(server, client, self.told))
            tasks = list(map(asyncio.create_task, ways))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def of(self, *kinds: str) -> list[Event]:
        """What the server said, of these types."""
        return [event for event in self.told if event["type"] in kinds]

    @property
    def responses(self) -> list[Event]:
        """As they ended."""
        return [event["response"] for event in self.of("response.done")]

    def text(self, response: Event | None = None) -> str:
        """Of a response, or of all."""
        return "".join(self._deltas(TEXT, response))

    def sound(self, response: Event | None = None) -> npt.NDArray[np.int16]:
        return np.frombuffer(b"".join(map(base64.b64decode, self._deltas(SOUND, response))), np.int16)

    def _deltas(self, kind: str, response: Event | None) -> list[str]:
        return [event["delta"] for event in self.of(kind) if response is None or event["response_id"] == response["id"]]


async def _pump(one: Connection, other: Connection, kept: list[Event]) -> None:
    try:
        async for message in one:
            kept.append(json.loads(message))
            await other.send(message)
    except ConnectionClosed:
        return


@asynccontextmanager
async def relay(server: str) -> AsyncIterator[Relay]:
    """`server`: its address, as clients of HTTP have it."""
    it = Relay(server)
    async with serve(it.pass_on, "127.0.0.1", 0, max_size=None) as listening:
        (socket,) = listening.sockets
        it.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        yield it
