"""`/v1/realtime`."""

from __future__ import annotations

from fastapi import FastAPI, WebSocket

from omni_cluster.engine.deadline import Deadline
from omni_cluster.server.realtime.outlet import Outlet
from omni_cluster.server.realtime.session import RealtimeSession
from omni_cluster.server.realtime.voice_activity import speech_model
from omni_cluster.server.services import Services
from omni_cluster.server.sessions import in_session


class RealtimeEndpoint:
    """Conversations on WebSockets."""

    def __init__(self, services: Services) -> None:
        self._its = services

    def add_to(self, api: FastAPI) -> None:
        api.add_api_websocket_route("/v1/realtime", self.realtime)

    async def realtime(self, socket: WebSocket) -> None:
        async def serve(until: Deadline) -> None:
            await self._its.reader.off_loop(speech_model)
            await RealtimeSession(self._its, socket, until).run()

        await in_session(self._its, socket, Outlet(socket).error, serve)
