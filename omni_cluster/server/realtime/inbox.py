"""What a client has sent and no handler has taken yet. Serve hands it over as fast as it comes, without a bound."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from starlette.types import Message
from starlette.websockets import WebSocket

from omni_cluster.openai_api.errors import BadRequest


class Inbox:
    """Texts in the order in which they came, `most_bytes` of them at most."""

    def __init__(self, socket: WebSocket, most_bytes: int) -> None:
        self._socket, self._most_bytes = socket, most_bytes
        self._texts: deque[str] = deque()
        self._held_bytes = 0
        self._has_ended = self._is_too_fast = False
        self._changed = asyncio.Event()

    async def fill(self) -> None:
        """Until the client leaves, or too much waits. Raises what breaks the connection; the texts end then."""
        try:
            while not self._has_ended:
                self._take(await self._socket.receive())
        finally:
            self._has_ended = True
            self._changed.set()

    def _take(self, message: Message) -> None:
        if message["type"] == "websocket.disconnect":
            self._has_ended = True
        else:
            text = message.get("text") or (message.get("bytes") or b"").decode("utf-8", "replace")
            self._texts.append(text)
            self._held_bytes += len(text)
            # A single event has a bound of its own.
            self._has_ended = self._is_too_fast = self._held_bytes > self._most_bytes and len(self._texts) > 1
        self._changed.set()

    async def texts(self) -> AsyncIterator[str]:
        """Ends once the client has left and all is taken. Raises BadRequest for a client that sends too fast."""
        while True:
            if self._is_too_fast:
                raise BadRequest(
                    f"More than {self._most_bytes} bytes of events wait to be handled; send sound as it is spoken.",
                    code="too_fast",
                )
            if self._texts:
                text = self._texts.popleft()
                self._held_bytes -= len(text)
                yield text
            elif self._has_ended:
                return
            else:
                self._changed.clear()
                await self._changed.wait()
