"""The body of an HTTP request, within its bound."""

from __future__ import annotations

from starlette.requests import Request

from omni_cluster.openai_api.errors import BadRequest


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body; BadRequest as soon as it is too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise BadRequest(f"the body is larger than {max_bytes} bytes; send less media at once.", status=413)
    return bytes(body)
