"""The contract of a running stage, whatever its engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk


class Stage(Protocol):
    """One stage's engine. `OmniLLM` and the cluster both drive stages through this, and nothing else."""

    async def start(self) -> None:
        """Brings the engine up; when it raises, nothing is left running."""

    def check(self, request: OmniRequest) -> None:
        """Raises RequestError for what this stage would refuse, before any stage has begun."""

    def generate(
        self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None
    ) -> AsyncGenerator[StageChunk, None]:
        """The stage's chunks of one request, the last one with a `finish_reason`.

        `upstream`: the chunks of the stage that feeds this one, None for a stage that the request itself feeds.
        Closing the iterator, at any point, frees all that the request holds here. Raises StageDied when the engine did.
        """

    def check_runs(self) -> None:
        """Raises StageDied if the engine is known to serve nothing any more; `check_health` asks it, this does not."""

    async def check_health(self) -> None:
        """Raises StageDied if the engine can no longer serve. Takes about a second at most, whatever it does."""

    async def counts(self) -> dict[str, int]:
        """What the engine holds now, by name: requests running, waiting, held; KV blocks in use."""

    async def shutdown(self) -> None: ...
