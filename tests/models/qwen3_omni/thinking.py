"""What tests ask the thinker by itself, and what it answers as transformers does."""

from __future__ import annotations

import numpy as np
import torch

from omni_cluster.models.qwen3_omni.thinker_stage import ROWS
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk
from omni_cluster.vllm_engine.stage_llm import StageLLM
from tests.engine.stages import collect
from tests.models.qwen3_omni.thinker_reference import Thought


async def think(thinker: StageLLM, asked: OmniRequest) -> StageChunk:
    return await collect(thinker.generate(asked, None))


def assert_equal(made: StageChunk, wanted: Thought) -> None:
    assert list(made.prompt_token_ids or ()) == wanted.prompt_ids
    assert list(made.token_ids) == wanted.token_ids


def assert_rows(made: StageChunk, wanted: Thought) -> None:
    """All positions of media have their rows and no other one has."""
    rows = made.rows
    assert rows is not None and (rows.kind, rows.start, rows.end) == (ROWS, 0, len(wanted.prompt_ids))
    assert rows.at.tolist() == np.flatnonzero(wanted.is_media).tolist()
    torch.testing.assert_close(rows.tensor(), wanted.rows[rows.at], atol=1e-4, rtol=0)
    assert rows.positions is not None
    assert np.array_equal(rows.positions, np.floor(wanted.positions))
