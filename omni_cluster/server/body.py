"""The bodies of HTTP requests: each within its bounds, and all that one ingress holds within theirs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Collection

from starlette.requests import ClientDisconnect, HTTPConnection, Request

from omni_cluster.openai_api.errors import BadRequest

BASE_BYTES = 65_536
"""What an upload counts beside its bytes: without any, it has a task and its headers."""
SLICE_BYTES = 1_048_576
"""Each slice of a body has `slice_timeout_s` of its own."""
CLIENT_LEFT = 499
JSON_TYPE = "application/json"


class Upload:
    """One body, from its request's headers until it has a place."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.is_ended = False
        self.patience = asyncio.timeout(None)

    def end(self) -> None:
        self.is_ended = True
        self.patience.reschedule(asyncio.get_running_loop().time())


class Uploads:
    """All of them have `most_bytes` together: above that the largest is ended, so that small ones always get in."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._open: set[Upload] = set()
        self.size_bytes = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Upload]:
        """Raises BadRequest, 429, for the upload that is ended."""
        upload = Upload()
        try:
            async with upload.patience:
                self._open.add(upload)
                self.grow(upload, BASE_BYTES)
                yield upload
        except TimeoutError:
            if not upload.is_ended:
                raise
            raise _too_much(self._most_bytes) from None
        finally:
            self._forget(upload)

    def grow(self, upload: Upload, size_bytes: int) -> None:
        """Counts bytes that came."""
        upload.size_bytes += size_bytes
        self.size_bytes += size_bytes
        while self.size_bytes > self._most_bytes and self._open:
            largest = max(self._open, key=lambda each: each.size_bytes)
            self._forget(largest)
            largest.end()

    def _forget(self, upload: Upload) -> None:
        if upload in self._open:
            self._open.remove(upload)
            self.size_bytes -= upload.size_bytes


async def read_body(
    request: Request,
    max_bytes: int,
    slice_timeout_s: float,
    uploads: Uploads,
    upload: Upload,
    media_type: str = JSON_TYPE,
) -> bytearray:
    """The whole body, not copied: of a large one a copy would hold up all other requests.

    Raises BadRequest for one that is not of `media_type`, for one that its header says is too large, as soon as it is
    too large, and when it comes too slowly.
    """
    _check_type(request, media_type)
    _check_size(_declared_bytes(request), max_bytes)
    body = bytearray()
    try:
        async with contextlib.aclosing(_in_time(request, slice_timeout_s)) as parts:
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


def _declared_bytes(request: Request) -> int:
    """0 where the header says nothing: the body is counted as it comes."""
    sent = request.headers.get("content-length", "")
    return int(sent) if sent.isdecimal() else 0


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


def check_origin(connection: HTTPConnection, origins: Collection[str]) -> None:
    """Raises BadRequest, 403, for what a page of another site sends unasked: a form, or a WebSocket's handshake.

    `origins`: pages that may.
    """
    origin = connection.headers.get("origin")
    host = origin.partition("://")[2] if origin else None
    if origin is None or origin in origins or "*" in origins or host == connection.headers.get("host"):
        return
    raise BadRequest(
        f"Pages of {origin[:60]!r} may not do so here; advanced.api.cors_origins lists those that may.",
        code="origin_not_allowed",
        status=403,
    )


def _too_much(most_bytes: int) -> BadRequest:
    return BadRequest(
        f"The bodies that clients send at the moment have more than {most_bytes} bytes together, and this is the "
        "largest of them; send it again later.",
        code="too_many_requests",
        status=429,
    )
