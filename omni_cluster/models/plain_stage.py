"""A running stage of Python alone: no vLLM, no worker, no card."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator

from omni_cluster.types.errors import StageDied
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk


class PlainStage(ABC):
    """A `Stage` that makes its chunks in the process of its replica. `make` is what differs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._is_up = False
        self._running = 0

    @abstractmethod
    def make(
        self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None
    ) -> AsyncGenerator[StageChunk, None]:
        """See `Stage.generate`: the chunks behind what is known of the request."""

    async def start(self) -> None:
        self._is_up = True

    def check(self, request: OmniRequest) -> None:  # noqa: B027 - nothing is refused unless a stage says so
        """See `Stage.check`."""

    async def generate(
        self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None
    ) -> AsyncGenerator[StageChunk, None]:
        """See `Stage.generate`: of a request that is begun again, first its known tokens or codes."""
        self.check_runs()
        known = request.known_of(self.name)
        if known.made:
            yield StageChunk(token_ids=known.token_ids, codes=known.codes)
        if known.has_ended:
            yield StageChunk(known.made, finish_reason=known.finish_reason)
            return
        self._running += 1
        try:
            async with contextlib.aclosing(self.make(request, upstream)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._running -= 1

    def check_runs(self) -> None:
        """See `Stage.check_runs`."""
        if not self._is_up:
            raise StageDied(f"stage {self.name} does not run; start it.")

    async def check_health(self) -> None:
        """See `Stage.check_health`."""
        self.check_runs()

    async def counts(self) -> dict[str, int]:
        """See `Stage.counts`."""
        return {"running": self._running, "waiting": 0}

    async def shutdown(self) -> None:
        self._is_up = False
