"""Long streams that are begun again, or preempted, say the same, and what transformers' logits and the noise give.

Of two codes that are alike to float32 rounding chooses. Seed 7 has such a tie at code 314: it falls the other way where
a prefix that is computed anew has other last bits. On a CPU it has the same ones. transformers' logits in float64 tell
a tie, so that no draw that is merely close passes for one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from omni_cluster.types.codes import Codes
from omni_cluster.types.inputs import KnownOutput, OmniRequest
from omni_cluster.types.outputs import StageChunk
from omni_cluster.vllm_engine.stage_llm import StageLLM
from tests.engine.stages import at_once, begun_at_once, collect, until_free
from tests.models.qwen3_omni.draws import TIE, Drawing, Judge
from tests.models.qwen3_omni.stages import served_talker, talking_as
from tests.models.qwen3_omni.thinker_engine import thinking

pytestmark = pytest.mark.full
PROMPT = "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"
REPLY_TOKENS, FRAMES, CROWD_FRAMES = 300, 600, 100
DRAWINGS = [pytest.param(Drawing(7), id="with a tie"), pytest.param(Drawing(None), id="greedy")]
CUTS = (10, 60, 313)
CROWD = [Drawing(seed) for seed in range(100, 115)] + [Drawing(None)]


@pytest.fixture(scope="module")
def judge(qwen3_reference: Any, qwen3_folder: Path) -> Judge:
    return Judge(qwen3_reference, qwen3_folder)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def replies(forked_engines: None, qwen3_folder: Path) -> dict[int | None, StageChunk]:
    """Of the thinker, by its seed."""
    async with thinking(qwen3_folder) as thinker:
        return {seed: await reply(thinker, seed) for seed in (7, None)}


async def reply(thinker: StageLLM, seed: int | None) -> StageChunk:
    sampling = {**Drawing(seed).sampling, "max_tokens": REPLY_TOKENS, "min_tokens": REPLY_TOKENS}
    return await collect(thinker.generate(OmniRequest(f"reply-{seed}", PROMPT, sampling={"thinker": sampling})))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def talker(forked_engines: None, qwen3_folder: Path) -> AsyncIterator[StageLLM]:
    async with talking_as(served_talker(), qwen3_folder) as stage:
        yield stage


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tight(forked_engines: None, qwen3_folder: Path) -> AsyncIterator[StageLLM]:
    """Three of eight requests fit into the KV cache to their ends."""
    blocks = 14 * 32 * 3 * 2 * 2 * 32 * 4
    config = served_talker(max_model_len=160, block_size=32, kv_cache_memory_bytes=blocks)
    async with talking_as(config, qwen3_folder) as stage:
        yield stage


def asked(name: str, drawing: Drawing, frames: int = FRAMES) -> OmniRequest:
    sampling = {**drawing.sampling, "max_tokens": frames, "min_tokens": frames}
    return OmniRequest(f"{name}-{drawing.seed}", "", voice="ethan", sampling={"talker": sampling})


async def said(talker: StageLLM, request: OmniRequest, reply: StageChunk) -> Codes:
    codes = (await collect(talker.generate(request, at_once([reply])))).codes
    assert codes is not None and codes.start == 0
    return codes


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card computes many positions by other kernels than one")
@pytest.mark.parametrize("drawing", DRAWINGS)
async def test_a_stream_that_is_begun_again_is_the_same(
    talker: StageLLM, replies: dict[int | None, StageChunk], drawing: Drawing
) -> None:
    reply = replies[drawing.seed]
    whole = await said(talker, asked("whole", drawing), reply)
    assert len(whole) == FRAMES - 1
    for cut in CUTS:
        known = {"talker": KnownOutput(codes=whole.between(0, cut))}
        assert await said(talker, replace(asked(f"again-{cut}", drawing), known=known), reply) == whole


@pytest.mark.parametrize("drawing", DRAWINGS)
async def test_each_code_is_drawn_by_transformers_logits(
    talker: StageLLM, judge: Judge, replies: dict[int | None, StageChunk], drawing: Drawing
) -> None:
    codes = await said(talker, asked("judged", drawing), replies[drawing.seed])
    assert (await judge.behind(replies[drawing.seed], codes.values, drawing)).max() < TIE


async def test_codes_of_a_crowd_of_which_many_are_preempted_are_drawn_by_them_too(
    tight: StageLLM, judge: Judge, replies: dict[int | None, StageChunk]
) -> None:
    before, reply = (await tight.counts())["preemptions"], replies[7]
    made = await begun_at_once(tight, [said(tight, asked("crowd", each, CROWD_FRAMES), reply) for each in CROWD])
    assert (await tight.counts())["preemptions"] >= before + len(CROWD) / 2
    for drawing, codes in zip(CROWD, made, strict=True):
        assert len(codes) == CROWD_FRAMES - 1
        assert (await judge.behind(reply, codes.values, drawing)).max() < TIE
    await until_free(tight)


async def test_a_code_that_was_not_drawn_is_told(
    talker: StageLLM, judge: Judge, replies: dict[int | None, StageChunk]
) -> None:
    reply, drawing = replies[7], Drawing(7)
    codes = (await said(talker, asked("told", drawing, 40), reply)).values
    for book in range(codes.shape[1]):
        other = codes.copy()
        other[20, book] = (other[20, book] + 1) % 256
        behind = await judge.behind(reply, other, drawing)
        assert behind[20, book] > TIE and behind[:20].max() < TIE and behind[21:].max() > TIE
    assert (await judge.behind(reply, codes, Drawing(8))).max() > TIE
