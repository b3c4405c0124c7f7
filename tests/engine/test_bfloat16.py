"""What bfloat16 on a card costs: the thinker's rows against transformers' in float32, with CUDA graphs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import takewhile

import pytest
import pytest_asyncio

from omni_cluster.models.stage import Stage
from omni_cluster.types.outputs import StageChunk
from tests.engine.stages import MAX_TOKENS, collect, pipeline_config, request, running, thinker_stage
from tests.reference import KINDS, Reference, ThinkerReference, media, prompt_text

pytestmark = pytest.mark.gpu
MAX_RELATIVE_ERROR = 0.03


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinker() -> AsyncIterator[Stage]:
    async with running(pipeline_config(thinker_stage(dtype="bfloat16", enforce_eager=False)), "thinker") as engine:
        yield engine


def comparable_rows(made: StageChunk, wanted: ThinkerReference) -> int:
    """Those of the prompt, and of the reply as long as both said the same."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(made.token_ids, wanted.token_ids, strict=False))
    return min(len(wanted.prompt_ids) + sum(1 for _ in same), wanted.rows.shape[0])


async def test_rows_are_those_of_float32_up_to_rounding(thinker: Stage, reference: Reference) -> None:
    wanted = [reference.thinker(prompt_text(kind), *media(kind), max_new_tokens=MAX_TOKENS) for kind in KINDS]
    made = [await collect(thinker.generate(request(f"alone-{kind}", kind), None)) for kind in KINDS]
    made += await asyncio.gather(*(collect(thinker.generate(request(f"all-{kind}", kind), None)) for kind in KINDS))
    decoded = 0
    for chunk, of_reference in zip(made, [*wanted, *wanted], strict=True):
        count = comparable_rows(chunk, of_reference)
        decoded += count - len(of_reference.prompt_ids)
        rows = of_reference.rows[:count]
        assert chunk.rows is not None
        assert (chunk.rows.tensor()[:count].float() - rows).norm() / rows.norm() < MAX_RELATIVE_ERROR
    assert decoded >= 2 * len(KINDS)
