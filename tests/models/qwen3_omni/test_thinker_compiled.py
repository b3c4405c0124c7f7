"""The thinker's decoder through torch.compile, as on a card."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from omni_cluster.vllm_engine.stage_llm import StageLLM
from tests.engine.stages import MAX_TOKENS, collect
from tests.models.qwen3_omni.thinker_engine import thinking
from tests.models.qwen3_omni.thinker_reference import ThinkerReference, media_of, prompt_text, request
from tests.reference import KINDS

pytestmark = [pytest.mark.parity, pytest.mark.full]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinker(forked_engines: None, qwen3_folder: Path) -> AsyncIterator[StageLLM]:
    async with thinking(qwen3_folder, enforce_eager=False, max_num_batched_tokens=96) as engine:
        yield engine


@pytest.mark.parametrize("kind", [*KINDS, "odd-heard"])
async def test_tokens_and_rows_are_the_references(
    thinker: StageLLM, qwen3_folder: Path, qwen3_reference: Any, kind: str
) -> None:
    reference = ThinkerReference(qwen3_folder, qwen3_reference)
    wanted = reference.think(prompt_text(kind), media_of(kind), MAX_TOKENS)
    made = await collect(thinker.generate(request(kind, kind), None))
    assert list(made.token_ids) == wanted.token_ids
    if kind != "text":
        assert made.rows is not None
        torch.testing.assert_close(made.rows.tensor(), wanted.rows[made.rows.at], atol=1e-4, rtol=0)
