"""The body of an HTTP request, within its bound."""

from __future__ import annotations

from starlette.requests import Request

from omni_cluster.openai_api.errors import BadRequest

_JSON = "application/json"


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body; BadRequest for one that is not called JSON, and as soon as it is too large."""
    _check_is_json(request)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise BadRequest(
                f"The request body has more than {max_bytes} bytes, which is the most that is accepted.",
                code="request_too_large",
                status=413,
            )
    return bytes(body)


def _check_is_json(request: Request) -> None:
    # Browsers let any page post other types, without asking the server first.
    sent = request.headers.get("content-type", "")
    if sent.partition(";")[0].strip().lower() != _JSON:
        raise BadRequest(
            f"The header Content-Type is {sent[:60]!r}, but it should be {_JSON!r}.",
            code="unsupported_content_type",
            status=415,
        )
