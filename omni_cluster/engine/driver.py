"""What drives one stage for one request, wherever the stage runs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from omni_cluster.engine.handover import Handover
from omni_cluster.engine.metrics import RequestMeter
from omni_cluster.engine.stage import Stage
from omni_cluster.inputs import OmniRequest
from omni_cluster.outputs import StageChunk


async def driven(
    stage: Stage, request: OmniRequest, upstream: AsyncGenerator[StageChunk, None] | None, meter: RequestMeter
) -> AsyncGenerator[StageChunk, None]:
    """The stage's chunks, counted; the last one says how the hand-over to the stage went. Closing this ends both."""
    handover = Handover(meter.handed_over)
    source = handover.watched(upstream) if upstream is not None else None
    async with contextlib.aclosing(stage.generate(request, source)) as chunks:
        async for made in chunks:
            meter.made(made)
            yield handover.signed(made)
