"""What a session sends: events of the server, in the order in which they are said."""

from __future__ import annotations

import json
from typing import Any

from starlette.websockets import WebSocket

from omni_cluster.openai_api.realtime.items import new_id
from omni_cluster.server.sessions import check_open


class Outlet:
    """One WebSocket. Each event gets an id of its own."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket

    async def send(self, kind: str, **fields: Any) -> int:
        """Returns how many bytes were sent. Raises WebSocketDisconnect once the client has left."""
        event = {"type": kind, "event_id": new_id("event"), **fields}
        text = json.dumps(event, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
        await self._deliver(text)
        return len(text)

    async def _deliver(self, text: str) -> None:
        check_open(self._socket)
        await self._socket.send_text(text)

    async def error(self, error: dict[str, Any], event_id: str | None = None) -> None:
        """`error`: as the API's other answers have it; `event_id`: the client's of what was wrong."""
        await self.send("error", error={**error, "event_id": event_id})


class HeldOutlet(Outlet):
    """Keeps events back until they may be sent; what comes after that is sent at once."""

    def __init__(self, socket: WebSocket) -> None:
        super().__init__(socket)
        self._held: list[str] | None = []

    async def _deliver(self, text: str) -> None:
        if self._held is None:
            await super()._deliver(text)
        else:
            self._held.append(text)

    async def release(self) -> None:
        """Sends what was kept back, in its order, also what comes meanwhile."""
        while self._held:
            await super()._deliver(self._held.pop(0))
        self._held = None
