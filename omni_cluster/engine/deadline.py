"""The time by which a request must have its whole answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from omni_cluster.types.errors import OmniError


class DeadlineExceeded(OmniError):
    """A request that took longer than it may."""


class Deadline:
    """Starts when it is made; all that a request does or waits for counts. `allowed`: its setting, for the error."""

    def __init__(self, timeout_s: float, allowed: str | None = None) -> None:
        self._allowed = allowed or f"limits.request_timeout_s = {timeout_s:g}"
        self._ends_s = time.monotonic() + timeout_s
        self._why: OmniError | None = None
        self._listeners: set[Callable[[], None]] = set()

    @property
    def left_s(self) -> float:
        return max(0.0, self._ends_s - time.monotonic())

    def come_now(self, why: OmniError) -> None:
        """The request ends now, with `why`, whatever time it had."""
        self._ends_s, self._why = time.monotonic(), why
        for listener in tuple(self._listeners):
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls `listener` if the deadline comes before its time."""
        self._listeners.add(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        self._listeners.discard(listener)

    def exceeded(self) -> OmniError:
        """The error for a request whose time is over: DeadlineExceeded, or why it came before its time."""
        return self._why or DeadlineExceeded(f"the request took longer than {self._allowed}; ask for less at once.")

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Cancels what is inside when the time is over, and raises `exceeded`."""
        timeout = asyncio.timeout(self.left_s)

        def ends() -> None:
            if not timeout.expired():
                timeout.reschedule(asyncio.get_running_loop().time())

        try:
            async with timeout:
                self.listen(ends)
                try:
                    yield
                finally:
                    self.unlisten(ends)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise self.exceeded() from None
