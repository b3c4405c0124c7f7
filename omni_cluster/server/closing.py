"""The end of a server: requests that were let in may finish for a while, and no others are let in."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from omni_cluster.engine.deadline import Deadline
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.types.errors import ServerClosing

CLOSING: Final = "server_closing"
LAST_WORDS_S: Final = 5.0
"""How long those that are ended may take to say so."""


class Closing:
    """The deadlines of all requests that are in, until the server closes and after that."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self._inside: set[Deadline] = set()
        self._left = asyncio.Event()

    def enter(self, deadline: Deadline) -> None:
        """Raises BadRequest, 503, once the server closes."""
        if self.begun.is_set():
            raise BadRequest(
                "The server is closing; send the request to another one, or later.", code=CLOSING, status=503
            )
        self._inside.add(deadline)

    def leave(self, deadline: Deadline) -> None:
        self._inside.remove(deadline)
        self._left.set()

    async def close(self, grace_s: float) -> None:
        """Returns when no request is left; ends after `grace_s` those that are."""
        self.begun.set()
        await self._until_empty(grace_s)
        for deadline in tuple(self._inside):  # one that ends may leave
            deadline.come_now(
                ServerClosing(f"the server is closing, and {grace_s:g} s were not enough; send it again.")
            )
        await self._until_empty(LAST_WORDS_S)

    async def _until_empty(self, wait_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._inside:
                    self._left.clear()
                    await self._left.wait()
