"""`/v1/audio/speech/stream`."""

from __future__ import annotations

from fastapi import FastAPI, WebSocket

from omni_cluster.engine.deadline import Deadline
from omni_cluster.server.services import Services
from omni_cluster.server.sessions import in_session
from omni_cluster.server.speech_parts import SpeechOutlet
from omni_cluster.server.speech_session import SpeechSession


class SpeechStreamEndpoint:
    """Reads texts aloud while they come, on WebSockets."""

    def __init__(self, services: Services) -> None:
        self._its = services

    def add_to(self, api: FastAPI) -> None:
        api.add_api_websocket_route("/v1/audio/speech/stream", self.speech_stream)

    async def speech_stream(self, socket: WebSocket) -> None:
        async def serve(until: Deadline) -> None:
            await SpeechSession(self._its, socket, until).run()

        await in_session(self._its, socket, SpeechOutlet(socket).error, serve)
