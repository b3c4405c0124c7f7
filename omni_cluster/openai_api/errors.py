"""Refusals as a client of the OpenAI API reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from omni_cluster.types.errors import RequestError

_SHOWN_CHARS = 60
_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error", 504: "server_error"}


class BadRequest(RequestError):
    """A refused request: one sentence, the field at fault, a machine-readable code, and the HTTP status.

    `param` is a path such as `messages[0].content[1].input_audio.data`; `status` is 400 unless the refusal has one of
    its own (404 model not found, 413 too large, 415 media type, 429 too many, 503 not now). `retry_after_s`: when the
    same request would pass, if that is known.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON body of the answer."""
        return error_body(self.message, status=self.status, param=self.param, code=self.code)


def invalid(param: str | None, sentence: str) -> BadRequest:
    """The refusal of a field's value."""
    return BadRequest(sentence, param=param, code="invalid_value")


def media_too_large(param: str, sentence: str) -> BadRequest:
    return BadRequest(sentence, param=param, code="media_too_large", status=413)


def check_at_most(param: str, value: int | None, most: int) -> None:
    """Raises BadRequest for more than is accepted; None: the client left it out."""
    if value is not None and value > most:
        raise invalid(param, f"{param} is {value}, but at most {most} are accepted.")


@contextmanager
def blamed_on(param: str) -> Iterator[None]:
    """A refusal inside that names no field gets `param` as its field."""
    try:
        yield
    except BadRequest:
        raise
    except RequestError as error:
        raise invalid(param, str(error)) from None


def error_body(message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error shape; the type follows from the HTTP status."""
    kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def lasts_too_long(kind: Literal["audio", "video"], max_s: float, param: str) -> BadRequest:
    return BadRequest(
        f"{param} lasts longer than {max_s:g} s, which is the most that is accepted.",
        param=param,
        code=f"{kind}_too_long",
        status=413,
    )


async def route_refused(request: Request, error: Exception) -> Response:
    """The answer where no route takes a request: Starlette's HTTPException for an unknown path or another's method."""
    fault = cast(HTTPException, error)
    path = json.dumps(request.scope["path"][:_SHOWN_CHARS])
    if fault.status_code == 405:
        methods = (fault.headers or {}).get("Allow", "")
        sentence, code = f"{request.method} is not for {path}; use {methods}.", "method_not_supported"
    else:
        served = ", ".join(sorted({route.path for route in request.app.routes if getattr(route, "methods", None)}))
        sentence, code = f"{path} is no path of this API, which has {served}.", "unknown_url"
    body = error_body(sentence, status=fault.status_code, code=code)
    return JSONResponse(body, fault.status_code, fault.headers)
