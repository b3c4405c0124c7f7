from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import pytest

from omni_cluster.engine.driver import run_stage
from omni_cluster.engine.metrics import StageMetrics
from omni_cluster.models.stage import Stage
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk


class Kept:
    """A stage that keeps what it reads from, as an error's frames do."""

    source: AsyncIterator[StageChunk] | None = None

    async def generate(
        self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None
    ) -> AsyncGenerator[StageChunk, None]:
        self.source = upstream
        assert upstream is not None
        while True:
            yield await anext(aiter(upstream))
            if request.reply:
                raise OSError(request.reply)


@pytest.mark.parametrize("breaks", [False, True])
async def test_a_stage_that_ends_early_has_let_go_of_its_source(breaks: bool) -> None:
    closed: list[bool] = []

    async def endless() -> AsyncGenerator[StageChunk, None]:
        try:
            while True:
                yield StageChunk()
        finally:
            closed.append(True)

    stage, request = Kept(), OmniRequest("r", "Hello.", reply="broken" if breaks else None)
    chunks: Any = run_stage(cast(Stage, stage), request, endless(), StageMetrics().begin())
    await anext(chunks)
    if breaks:
        with pytest.raises(OSError, match="broken"):
            await anext(chunks)
    else:
        await chunks.aclose()
    assert closed and stage.source is not None
