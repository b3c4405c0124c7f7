"""How long chunks take from the stage that makes them to the stage that consumes them."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

from omni_cluster.outputs import HandoverTimes, StageChunk


class Handover:
    """The hand-over to one stage for one request.

    Two processes, perhaps two hosts, take part: times are the wall clock's, and good to what the hosts' clocks agree.
    """

    def __init__(self) -> None:
        self._delays_s: list[float] = []

    async def watched(self, upstream: AsyncGenerator[StageChunk, None]) -> AsyncGenerator[StageChunk, None]:
        """The chunks as they come; closing this closes `upstream`."""
        async with contextlib.aclosing(upstream) as chunks:
            async for chunk in chunks:
                self._delays_s.append(time.time() - chunk.made_at_s)
                yield chunk

    def signed(self, chunk: StageChunk) -> StageChunk:
        """The stage's last chunk says how its hand-over went; others are as they were."""
        if chunk.finish_reason is None or not self._delays_s:
            return chunk
        return replace(chunk, handover=HandoverTimes(statistics.median(self._delays_s), max(self._delays_s)))
