"""How long chunks take from the stage that makes them to the stage that consumes them."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import AsyncGenerator, Callable
from typing import Final

from msgspec.structs import replace
from opentelemetry import trace
from opentelemetry.context import get_current

from omni_cluster.types.outputs import HandoverTimes, StageChunk

TRACER: Final = trace.get_tracer("omni_cluster")
"""Does nothing where the process has no provider of traces: Ray Serve's, or vLLM's."""
SPAN: Final = "handover"


class Handover:
    """The hand-over to one stage for one request.

    Chunks of another host are timed by its clock, so their times are as exact as the two clocks agree, and at least 0.
    `observe` is called with the seconds of every chunk.
    """

    def __init__(self, observe: Callable[[float], object] | None = None) -> None:
        self._delays_s: list[float] = []
        self._observe = observe
        self._first_made_s = 0.0
        self._request = get_current()

    async def watched(self, upstream: AsyncGenerator[StageChunk, None]) -> AsyncGenerator[StageChunk, None]:
        """The chunks as they come; closing this closes `upstream`."""
        try:
            async with contextlib.aclosing(upstream) as chunks:
                async for chunk in chunks:
                    self._first_made_s = self._first_made_s or chunk.made_at_s
                    self._note(max(0.0, time.time() - chunk.made_at_s))
                    yield chunk
        finally:
            self._trace()

    def _trace(self) -> None:
        """One span in the request's trace, if it has one: the first chunk's way, with the times of all."""
        if not self._delays_s:
            return
        times = {"median_s": statistics.median(self._delays_s), "max_s": max(self._delays_s)}
        span = TRACER.start_span(
            SPAN,
            self._request,
            start_time=_ns(self._first_made_s),
            attributes={"chunks": len(self._delays_s), **times},
        )
        span.end(_ns(self._first_made_s + self._delays_s[0]))

    def _note(self, delay_s: float) -> None:
        self._delays_s.append(delay_s)
        if self._observe is not None:
            self._observe(delay_s)

    def signed(self, chunk: StageChunk) -> StageChunk:
        """Adds the hand-over's times to the stage's last chunk; returns other chunks unchanged."""
        if chunk.finish_reason is None or not self._delays_s:
            return chunk
        return replace(chunk, handover=HandoverTimes(statistics.median(self._delays_s), max(self._delays_s)))


def _ns(time_s: float) -> int:
    return int(time_s * 1e9)
