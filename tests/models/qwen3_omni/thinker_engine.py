"""The thinker's engine on the tiny checkpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from omni_cluster.config.handover import HandoverConfig
from omni_cluster.config.schema import PipelineConfig
from omni_cluster.models.chat_files import FileTokenizer
from omni_cluster.models.prompts import PromptMaker
from omni_cluster.models.qwen3_omni.thinker_stage import Thinker
from omni_cluster.vllm_engine.stage_llm import StageLLM
from tests.engine.stages import thinker_stage


class OfFolder:
    """What the stage asks of its family."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._prompts = PromptMaker(FileTokenizer(folder))

    def tokenize(self, text: str, has_marks: bool) -> list[int]:
        return self._prompts.marked_ids(text) if has_marks else self._prompts.text_ids(text)


def pipeline_config(folder: Path, **engine_args: Any) -> PipelineConfig:
    stage = thinker_stage(**engine_args)
    return PipelineConfig(
        model=str(folder), family="qwen3_omni", stages=[stage], handover=HandoverConfig(kept_rows_bytes=1 << 20)
    )


@asynccontextmanager
async def thinking(folder: Path, **engine_args: Any) -> AsyncIterator[StageLLM]:
    config = pipeline_config(folder, **engine_args)
    engine = StageLLM(config.stages[0], config, Thinker(OfFolder(folder)), str(folder))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.shutdown()
