"""What tests ask the thinker by itself, and what it answers as transformers does."""

from __future__ import annotations

import numpy as np
import torch

from omni_cluster.models.qwen3_omni.fine_positions import as_floats
from omni_cluster.models.qwen3_omni.talker_prompt import talker_positions
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
    """All positions of media have their rows and no other one has; with them come the talker's positions."""
    rows = made.rows
    assert rows is not None and (rows.kind, rows.start, rows.end) == (ROWS, 0, len(wanted.prompt_ids))
    assert rows.at.tolist() == np.flatnonzero(wanted.is_media).tolist()
    torch.testing.assert_close(rows.tensor(), wanted.rows[rows.at], atol=1e-4, rtol=0)
    assert rows.positions is not None and rows.positions.shape == wanted.positions.shape
    of_users = as_floats(rows.positions)[:, wanted.is_user]
    made_positions = talker_positions(of_users, wanted.is_media[wanted.is_user], following=9)
    assert np.array_equal(made_positions, wanted.talker_positions)
