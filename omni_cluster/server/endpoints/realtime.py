"""`/v1/realtime`."""

from __future__ import annotations

import contextlib
from typing import Any, Final

from fastapi import FastAPI, WebSocket, WebSocketDisconnect

from omni_cluster.engine.deadline import DeadlineExceeded
from omni_cluster.openai_api.access import POLICY_VIOLATION
from omni_cluster.openai_api.errors import BadRequest, error_body
from omni_cluster.server.body import check_origin
from omni_cluster.server.realtime.outlet import Outlet
from omni_cluster.server.realtime.session import RealtimeSession
from omni_cluster.server.realtime.voice_activity import speech_model
from omni_cluster.server.refusals import error_answer
from omni_cluster.server.services import Services
from omni_cluster.types.errors import ServerClosing

SUBPROTOCOL: Final = "realtime"
GOING_AWAY: Final = 1001
TRY_AGAIN_LATER: Final = 1013
"""WebSocket close codes; clients connect again after both."""


class RealtimeEndpoint:
    """Conversations on WebSockets. Each has a place of its own beside those of requests."""

    def __init__(self, services: Services) -> None:
        self._its = services

    def add_to(self, api: FastAPI) -> None:
        api.add_api_websocket_route("/v1/realtime", self.realtime)

    async def realtime(self, socket: WebSocket) -> None:
        """A browser's page selects the protocol by its name, and takes no answer without one."""
        subprotocol = SUBPROTOCOL if SUBPROTOCOL in socket.scope["subprotocols"] else None
        await socket.accept(subprotocol)
        try:
            check_origin(socket, self._its.bound.config.api.cors_origins)
            async with self._its.admission.session() as until, until.kept():
                await self._its.reader.off_loop(speech_model)
                await RealtimeSession(self._its, socket, until).run()
        except WebSocketDisconnect:
            return
        except BadRequest as error:
            is_full = error.status in (429, 503)
            await self._refuse(socket, error.body()["error"], TRY_AGAIN_LATER if is_full else POLICY_VIOLATION)
        except DeadlineExceeded:
            limits = self._its.bound.config.limits
            sentence = f"A session lasts at most {limits.max_session_s:g} s; connect again."
            await self._refuse(socket, error_body(sentence, code="session_expired")["error"], GOING_AWAY)
        except ServerClosing as error:
            await self._refuse(socket, error_answer(error)[1]["error"], GOING_AWAY)

    async def _refuse(self, socket: WebSocket, error: dict[str, Any], code: int) -> None:
        with contextlib.suppress(WebSocketDisconnect):
            await Outlet(socket).error(error)
            await socket.close(code, error["code"])
