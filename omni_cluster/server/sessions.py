"""Connections that stay open: how a WebSocket is let in, and how it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from omni_cluster.engine.deadline import Deadline, DeadlineExceeded
from omni_cluster.openai_api.access import POLICY_VIOLATION
from omni_cluster.openai_api.errors import BadRequest, error_body
from omni_cluster.server.body import check_origin
from omni_cluster.server.refusals import error_answer
from omni_cluster.server.services import Services
from omni_cluster.types.errors import ServerClosing

SUBPROTOCOL: Final = "realtime"
NORMAL_CLOSURE: Final = 1000
ABNORMAL_CLOSURE: Final = 1006
GOING_AWAY: Final = 1001
TRY_AGAIN_LATER: Final = 1013
"""WebSocket close codes; clients connect again after these two."""
SayError = Callable[[dict[str, Any]], Awaitable[None]]
Serve = Callable[[Deadline], Awaitable[None]]
"""Is told until when the session may last."""


async def in_session(its: Services, socket: WebSocket, say: SayError, serve: Serve) -> None:
    """Accepts the socket and lets `serve` have it, in a place of its own beside those of requests.

    What ends the session is said, as the `error` of an answer, before the socket is closed. A browser's page selects
    the protocol by its name, and takes no answer without one.
    """
    await socket.accept(SUBPROTOCOL if SUBPROTOCOL in socket.scope["subprotocols"] else None)
    try:
        check_origin(socket, its.bound.config.api.cors_origins)
        async with its.admission.session() as until, until.kept():
            await serve(until)
    except WebSocketDisconnect:
        return
    except BadRequest as error:
        is_full = error.status in (429, 503)
        await _refuse(socket, say, error.body(), TRY_AGAIN_LATER if is_full else POLICY_VIOLATION)
    except DeadlineExceeded:
        sentence = f"A session lasts at most {its.bound.config.limits.max_session_s:g} s; connect again."
        await _refuse(socket, say, error_body(sentence, code="session_expired"), GOING_AWAY)
    except ServerClosing as error:
        await _refuse(socket, say, error_answer(error)[1], GOING_AWAY)


async def _refuse(socket: WebSocket, say: SayError, body: dict[str, Any], code: int) -> None:
    with contextlib.suppress(WebSocketDisconnect):
        await say(body["error"])
        await socket.close(code, body["error"]["code"])


def check_open(socket: WebSocket) -> None:
    """Raises WebSocketDisconnect once another task saw that the client has left."""
    if socket.application_state != WebSocketState.CONNECTED:
        raise WebSocketDisconnect(ABNORMAL_CLOSURE)
