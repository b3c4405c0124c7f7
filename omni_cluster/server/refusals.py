"""From an error to its answer: status, body and headers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import JSONResponse

from omni_cluster.engine.deadline import DeadlineExceeded
from omni_cluster.openai_api.errors import BadRequest, error_body
from omni_cluster.server.closing import CLOSING
from omni_cluster.server.log import logger
from omni_cluster.types.errors import (
    DIED,
    NotFinite,
    OmniError,
    PromptTooLong,
    RequestError,
    ServerClosing,
    StageDied,
    StoreFull,
)

RETRY_AFTER_S: Final = 2

_HEADERS: Final[Mapping[int, Mapping[str, str]]] = {
    408: {"Connection": "close"},  # or the rest of a body that comes slowly would keep it open
    # Not 413: closed while a body still comes, a connection is reset, and clients that send all of it first may lose
    # the answer. The HTTP server drops what comes on.
    429: {"Retry-After": str(RETRY_AFTER_S)},
    503: {"Retry-After": str(RETRY_AFTER_S)},
}
_BY_KIND: Final = (
    (DeadlineExceeded, 504, "deadline_exceeded"),
    (NotFinite, 500, "not_finite"),
    (StoreFull, 503, "store_full"),
    (OmniError, 500, "server_error"),
)


def refusal(status: int, body: object, error: Exception) -> JSONResponse:
    """An error's answer, with the headers that go with its status, and when to come again where that is known."""
    headers = dict(_HEADERS.get(status, {}))
    if isinstance(error, BadRequest) and error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, BadRequest) and error.code == CLOSING:
        headers["Connection"] = "close"  # the client's next request finds another server, if there is one
    return JSONResponse(body, status, headers)


def error_answer(error: Exception, prompt: str = "messages") -> tuple[int, dict[str, Any]]:
    """HTTP status and body for an error; what is not the client's doing is logged. `prompt`: the field that has it."""
    if not isinstance(error, RequestError | ServerClosing):
        logger.exception("a request failed")
    return status_and_body(error, prompt)


def status_and_body(error: Exception, prompt: str = "messages") -> tuple[int, dict[str, Any]]:
    """The same, without a line in the log."""
    if isinstance(error, BadRequest):
        return error.status, error.body()
    if isinstance(error, PromptTooLong):
        return 400, error_body(str(error), param=prompt, code="context_length_exceeded")
    if isinstance(error, RequestError):
        return 400, error_body(str(error))
    if isinstance(error, ServerClosing):
        return 503, error_body(str(error), status=503, code=CLOSING)
    if isinstance(error, StageDied):
        return 503, error_body(DIED, status=503, code="stage_died")
    for kind, status, code in _BY_KIND:
        if isinstance(error, kind):
            return status, error_body(str(error), status=status, code=code)
    return 500, error_body("the server failed; its log has the cause.", status=500, code="server_error")
