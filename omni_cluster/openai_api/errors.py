"""Refusals as a client of the OpenAI API reads them."""

from __future__ import annotations

from typing import Any

from omni_cluster.errors import RequestError

_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error", 504: "server_error"}


class BadRequest(RequestError):
    """A refused request: one sentence, the field at fault, a machine-readable code, and the HTTP status.

    `param` is a path such as `messages[0].content[1].input_audio.data`; `status` is 400 unless the refusal has one of
    its own (404 model not found, 413 too large, 415 media type, 429 too many, 503 not now).
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status

    def body(self) -> dict[str, Any]:
        """The JSON body of the answer."""
        return error_body(self.message, status=self.status, param=self.param, code=self.code)


def error_body(message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error shape; the type follows from the HTTP status."""
    kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
