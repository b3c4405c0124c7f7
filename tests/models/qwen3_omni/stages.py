"""The talker's stage alone, on the tiny checkpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omni_cluster.config.loader import STAGE_CONFIGS, load_config
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.models.qwen3_omni.talker_stage import Talker
from omni_cluster.models.registry import known_families
from omni_cluster.vllm_engine.stage_llm import StageLLM
from tests.models.qwen3_omni.spoken import MAX_CODES

STEP_TOKENS = 24
"""Of a step: all prompts but the shortest take several."""


@dataclass(frozen=True)
class Checkpoint:
    """In place of a family."""

    folder: Path

    def check_voice(self, voice: str | None) -> str:
        return voice or "aiden"


def talker_stage(**settings: Any) -> StageConfig:
    """Prompts need several steps, and three requests do not always fit into the KV cache at once."""
    return StageConfig(
        stage_id=1,
        model_stage="talker",
        num_gpus=0,
        final_output_type="audio",
        engine_args={
            "dtype": "float32",
            "enforce_eager": not torch.cuda.is_available(),  # a card replays CUDA graphs
            "max_model_len": 160,
            "max_num_seqs": 8,
            "max_num_batched_tokens": STEP_TOKENS,
            "block_size": 32,
            "kv_cache_memory_bytes": 6 * 32 * 3 * 2 * 2 * 32 * 4,  # six blocks
        },
        default_sampling_params={"temperature": 0, "repetition_penalty": 1.05, "max_tokens": MAX_CODES},
        **settings,
    )


def served_talker(**engine_args: Any) -> StageConfig:
    """As the served configuration has it, but for `engine_args`."""
    config = load_config(STAGE_CONFIGS / "qwen3_omni_tiny.yaml", known_families=known_families())
    stage = next(each for each in config.stages if each.model_stage == "talker")
    alone = {"engine_input_source": [], "final_output_type": "audio"}
    return stage.model_copy(update=alone | {"engine_args": stage.engine_args | engine_args})


@asynccontextmanager
async def talking(folder: Path, **settings: Any) -> AsyncIterator[StageLLM]:
    async with talking_as(talker_stage(**settings), folder) as stage:
        yield stage


@asynccontextmanager
async def talking_as(config: StageConfig, folder: Path) -> AsyncIterator[StageLLM]:
    pipeline = PipelineConfig(model=str(folder), family="none", stages=[config])
    stage = StageLLM(config, pipeline, Talker(Checkpoint(folder)), str(folder))
    await stage.start()
    try:
        yield stage
    finally:
        await stage.shutdown()
