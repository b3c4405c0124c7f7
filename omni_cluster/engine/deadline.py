"""The time by which a request must have its whole answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from omni_cluster.errors import OmniError


class DeadlineExceeded(OmniError):
    """A request that took longer than it may."""


class Deadline:
    """Starts when it is made; all that a request does or waits for counts. `allowed`: its setting, for the error."""

    def __init__(self, timeout_s: float, allowed: str | None = None) -> None:
        self._allowed = allowed or f"limits.request_timeout_s = {timeout_s:g}"
        self._ends_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._ends_s - time.monotonic())

    def exceeded(self) -> DeadlineExceeded:
        """The error for a request that ran out of time."""
        return DeadlineExceeded(f"the request took longer than {self._allowed}; ask for less at once.")

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Cancels what is inside when the time is over, and raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(self.left_s) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise self.exceeded() from None
