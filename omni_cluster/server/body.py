"""The body of an HTTP request, within its bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing

from starlette.requests import ClientDisconnect, Request

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.server.uploads import Upload, Uploads

SLICE_BYTES = 1_048_576
"""Each slice of a body has `slice_timeout_s` of its own."""
CLIENT_LEFT = 499
JSON_TYPE = "application/json"


async def read_body(
    request: Request,
    max_bytes: int,
    slice_timeout_s: float,
    uploads: Uploads,
    upload: Upload,
    media_type: str = JSON_TYPE,
) -> bytearray:
    """The whole body, not copied: of a large one a copy would hold up all other requests.

    Raises BadRequest for one that is not of `media_type`, as soon as it is too large, and when it comes too slowly.
    """
    _check_type(request, media_type)
    body = bytearray()
    try:
        async with aclosing(_in_time(request, slice_timeout_s)) as parts:
            async for part in parts:
                body += part
                uploads.grow(upload, len(part))
                _check_size(len(body), max_bytes)
    except ClientDisconnect:
        raise BadRequest("The client left before its body was there.", status=CLIENT_LEFT) from None
    return body


async def _in_time(request: Request, slice_timeout_s: float) -> AsyncGenerator[bytes, None]:
    """The body's parts as they come. Raises BadRequest, 408, when a slice is not whole in its time."""
    parts = aiter(request.stream())
    loop = asyncio.get_running_loop()
    received, ends_s = 0, loop.time() + slice_timeout_s
    while True:
        try:
            async with asyncio.timeout_at(ends_s) as patience:
                part = await anext(parts, None)
        except TimeoutError:
            if not patience.expired():
                raise
            raise too_slow(f"{SLICE_BYTES} bytes of it took more than {slice_timeout_s:g} s") from None
        if part is None:
            return
        if (received + len(part)) // SLICE_BYTES > received // SLICE_BYTES:
            ends_s = loop.time() + slice_timeout_s
        received += len(part)
        yield part


def too_slow(fault: str) -> BadRequest:
    return BadRequest(f"The request body comes too slowly: {fault.rstrip('.')}.", code="request_timeout", status=408)


def _check_size(size_bytes: int, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        raise BadRequest(
            f"The request body has more than {max_bytes} bytes, which is the most that is accepted.",
            code="request_too_large",
            status=413,
        )


def _check_type(request: Request, media_type: str) -> None:
    # Browsers let any page post other types than JSON, forms among them, without asking the server first.
    sent = request.headers.get("content-type", "")
    if sent.partition(";")[0].strip().lower() != media_type:
        raise BadRequest(
            f"The header Content-Type is {sent[:60]!r}, but it should be {media_type!r}.",
            code="unsupported_content_type",
            status=415,
        )


def check_origin(request: Request, origins: Collection[str]) -> None:
    """Raises BadRequest, 403, for a form that a page of another site sends: browsers ask the server only after that.

    `origins`: pages that may.
    """
    origin = request.headers.get("origin")
    host = origin.partition("://")[2] if origin else None
    if origin is None or origin in origins or "*" in origins or host == request.headers.get("host"):
        return
    raise BadRequest(
        f"Pages of {origin[:60]!r} may not send forms here; api.cors_origins lists those that may.",
        code="origin_not_allowed",
        status=403,
    )
