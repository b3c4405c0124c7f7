"""What drives one stage for one request, wherever the stage runs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from omni_cluster.engine.handover import Handover
from omni_cluster.engine.metrics import RequestMeter
from omni_cluster.models.stage import Stage
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk


async def run_stage(
    stage: Stage, request: OmniRequest, upstream: AsyncGenerator[StageChunk, None] | None, meter: RequestMeter
) -> AsyncGenerator[StageChunk, None]:
    """The stage's chunks, counted; the last one says how the hand-over to the stage went. Closing this ends both."""
    handover, source = Handover(meter.handed_over), None
    async with contextlib.AsyncExitStack() as cleanup:
        if upstream is not None:
            # Not left to the garbage collector: what came and was not read is held until then.
            source = await cleanup.enter_async_context(contextlib.aclosing(handover.watched(upstream)))
        chunks = await cleanup.enter_async_context(contextlib.aclosing(stage.generate(request, source)))
        async for made in chunks:
            meter.made(made)
            yield handover.signed(made)
