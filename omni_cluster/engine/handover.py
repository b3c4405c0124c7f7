"""How long chunks take from the stage that makes them to the stage that consumes them."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import AsyncGenerator, Callable

from msgspec.structs import replace

from omni_cluster.outputs import HandoverTimes, StageChunk


class Handover:
    """The hand-over to one stage for one request.

    Two processes, perhaps two hosts, take part: times are wall-clock times, as exact as the hosts' clocks agree.
    `observe` is called with the seconds of every chunk.
    """

    def __init__(self, observe: Callable[[float], object] | None = None) -> None:
        self._delays_s: list[float] = []
        self._observe = observe

    async def watched(self, upstream: AsyncGenerator[StageChunk, None]) -> AsyncGenerator[StageChunk, None]:
        """The chunks as they come; closing this closes `upstream`."""
        async with contextlib.aclosing(upstream) as chunks:
            async for chunk in chunks:
                self._note(time.time() - chunk.made_at_s)
                yield chunk

    def _note(self, delay_s: float) -> None:
        self._delays_s.append(delay_s)
        if self._observe is not None:
            self._observe(delay_s)

    def signed(self, chunk: StageChunk) -> StageChunk:
        """Adds the hand-over's times to the stage's last chunk; returns other chunks unchanged."""
        if chunk.finish_reason is None or not self._delays_s:
            return chunk
        return replace(chunk, handover=HandoverTimes(statistics.median(self._delays_s), max(self._delays_s)))
