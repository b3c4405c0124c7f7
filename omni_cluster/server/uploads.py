"""The bodies that one ingress holds before it works on them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from omni_cluster.openai_api.errors import BadRequest

BASE_BYTES = 65_536
"""What an upload counts beside its bytes: without any, it has a task and its headers."""


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


def _too_much(most_bytes: int) -> BadRequest:
    return BadRequest(
        f"The bodies that clients send at the moment have more than {most_bytes} bytes together, and this is the "
        "largest of them; send it again later.",
        code="too_many_requests",
        status=429,
    )
