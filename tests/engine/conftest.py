"""Stages that several modules use: an engine takes ten seconds and more to start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest_asyncio

from omni_cluster.config.handover import HandoverConfig
from omni_cluster.config.schema import PipelineConfig
from omni_cluster.models.stage import Stage
from omni_cluster.types.errors import StageDied
from tests.engine.stages import (
    KEPT_ROWS_BYTES,
    TALKER_STEP_TOKENS,
    THINKER_STEP_TOKENS,
    pipeline_config,
    running,
    talker_stage,
    thinker_stage,
    tight,
)


class SharedStage:
    """A stage that is started for the first module that asks for it, and again when a test has killed it."""

    def __init__(self, config: PipelineConfig, model_stage: str) -> None:
        self._config, self._model_stage = config, model_stage
        self._stage: Stage | None = None
        self._cleanup = AsyncExitStack()

    async def stage(self) -> Stage:
        if self._stage is None or await _is_dead(self._stage):
            await self.stop()
            self._stage = await self._cleanup.enter_async_context(running(self._config, self._model_stage))
        return self._stage

    async def stop(self) -> None:
        self._stage = None
        await self._cleanup.aclose()


async def _is_dead(stage: Stage) -> bool:
    try:
        await stage.check_health()
    except StageDied:
        return True
    return False


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _shared_thinker(forked_engines: None) -> AsyncIterator[SharedStage]:
    handover = HandoverConfig(kept_rows_bytes=KEPT_ROWS_BYTES)
    shared = SharedStage(pipeline_config(thinker_stage(**tight(THINKER_STEP_TOKENS)), handover=handover), "thinker")
    yield shared
    await shared.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _shared_talker(forked_engines: None) -> AsyncIterator[SharedStage]:
    shared = SharedStage(pipeline_config(talker=talker_stage(**tight(TALKER_STEP_TOKENS))), "talker")
    yield shared
    await shared.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tight_thinker(_shared_thinker: SharedStage) -> Stage:
    """Prompts need several steps, and eight requests do not fit into the KV cache at once."""
    return await _shared_thinker.stage()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tight_talker(_shared_talker: SharedStage) -> Stage:
    """Prompts need several steps, and eight streams do not fit into the KV cache at once."""
    return await _shared_talker.stage()
