"""Videos, with and without their sound: the thinker's tokens, rows and positions are the reference's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import KnownOutput, Media, OmniRequest, Video
from omni_cluster.types.outputs import StageChunk
from omni_cluster.vllm_engine.stage_llm import StageLLM
from tests.engine.stages import MAX_TOKENS, begun_at_once, until_free
from tests.models.qwen3_omni.thinker_engine import thinking
from tests.models.qwen3_omni.thinker_reference import (
    SEEN_KINDS,
    ThinkerReference,
    Thought,
    media_of,
    prompt_text,
    request,
)
from tests.models.qwen3_omni.thinking import assert_equal, assert_rows, think
from tests.reference import synthetic_video

pytestmark = [pytest.mark.parity, pytest.mark.full]
MAX_MODEL_LEN = 2048
MAX_NUM_BATCHED_TOKENS = 96
BLOCK = 32
LONG_REPLY = 200
SIZES: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
    "limit_mm_per_prompt": {"audio": 2, "image": 2, "video": 3},
    "block_size": BLOCK,
    "kv_cache_memory_bytes": (MAX_MODEL_LEN // BLOCK + 2) * 2 * 6 * 2 * 32 * 4 * BLOCK,
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinker(forked_engines: None, qwen3_folder: Path) -> AsyncIterator[StageLLM]:
    """Prompts of videos need several steps, which cut their items anywhere."""
    async with thinking(qwen3_folder, **SIZES) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(qwen3_folder: Path, qwen3_reference: Any) -> ThinkerReference:
    return ThinkerReference(qwen3_folder, qwen3_reference)


@pytest.fixture(scope="module")
def thought(reference: ThinkerReference) -> dict[str, Thought]:
    return {kind: reference.think(prompt_text(kind), media_of(kind), MAX_TOKENS) for kind in SEEN_KINDS}


def assert_said(made: StageChunk, wanted: Thought) -> None:
    assert_equal(made, wanted)
    assert_rows(made, wanted)


@pytest.mark.parametrize("kind", SEEN_KINDS)
async def test_tokens_rows_and_positions_are_the_references(
    thinker: StageLLM, thought: dict[str, Thought], kind: str
) -> None:
    wanted = thought[kind]
    assert len(wanted.prompt_ids) > 2 * MAX_NUM_BATCHED_TOKENS
    for turn in ("first", "cached"):
        made = await think(thinker, request(f"{turn}-{kind}", kind))
        assert_said(made, wanted)
    assert made.cached_tokens > MAX_NUM_BATCHED_TOKENS


def test_frames_of_odd_rates_are_at_positions_between_whole_ones(thought: dict[str, Thought]) -> None:
    odd = [kind for kind in SEEN_KINDS if thought[kind].following % 1]
    assert odd == ["heard-slow+audio+heard+heard-short", "odd"]


async def test_tokens_and_rows_survive_preemption(thinker: StageLLM, reference: ThinkerReference) -> None:
    before = (await thinker.counts())["preemptions"]
    longer = {kind: reference.think(prompt_text(kind), media_of(kind), LONG_REPLY) for kind in ("video", "odd-heard")}
    sampling = {"thinker": {"skip_reading_prefix_cache": True, "max_tokens": LONG_REPLY}}
    kinds = [*longer] * 3
    crowd = [request(f"crowd-{i}", kind, sampling=sampling) for i, kind in enumerate(kinds)]
    made = await begun_at_once(thinker, [think(thinker, asked) for asked in crowd])
    for kind, chunk in zip(kinds, made, strict=True):
        assert_said(chunk, longer[kind])
    assert (await thinker.counts())["preemptions"] > before
    await until_free(thinker)


@pytest.mark.parametrize("kind", ["odd-heard", "heard-slow+audio+heard+heard-short"])
async def test_a_request_that_is_begun_again_goes_on_as_it_was(
    thinker: StageLLM, thought: dict[str, Thought], kind: str
) -> None:
    wanted = thought[kind]
    known = {"thinker": KnownOutput(tuple(wanted.token_ids[: MAX_TOKENS // 2]))}
    assert_said(await think(thinker, request(f"again-{kind}", kind, known=known)), wanted)


async def test_a_reply_behind_a_wide_video_of_little_sound_goes_on_from_the_end_of_its_prompt(
    thinker: StageLLM, reference: ThinkerReference
) -> None:
    """The video's columns reach farther than what follows it, and the reply's positions do not go by them."""
    given = Media(videos=(synthetic_video(2, fps=2.0, audio_s=0.05, seed=1),))
    text = prompt_text("heard", "")
    wanted = reference.think(text, given, MAX_TOKENS)
    assert wanted.following == wanted.positions[0, -1] + 1 < wanted.positions.max()
    assert_said(await think(thinker, OmniRequest("wide", text, given)), wanted)


async def answer(thinker: StageLLM, request_id: str, video: Video, wants_audio: bool = True) -> list[int]:
    asked = OmniRequest(request_id, prompt_text("video"), Media(videos=(video,)), wants_audio=wants_audio)
    return list((await think(thinker, asked)).token_ids)


@pytest.mark.parametrize("wants_audio", [True, False])
async def test_the_same_frames_at_another_rate_or_with_other_sound_are_another_video(
    thinker: StageLLM, reference: ThinkerReference, wants_audio: bool
) -> None:
    plain, heard = synthetic_video(4, fps=2.0), synthetic_video(4, fps=2.0, audio_s=2.5)
    silent = Video(plain.frames, plain.fps, np.zeros(40_000, np.float32))
    changed = [plain, Video(plain.frames, fps=0.1), heard, silent]
    wanted = [reference.think(prompt_text("video"), Media(videos=(v,)), MAX_TOKENS).token_ids for v in changed]
    assert len(set(map(tuple, wanted))) == len(wanted)
    for turn in range(2):
        names = [f"again-{wants_audio}-{turn}-{index}" for index in range(len(changed))]
        made = [answer(thinker, name, video, wants_audio) for name, video in zip(names, changed, strict=True)]
        assert await asyncio.gather(*made) == wanted


async def test_more_videos_than_the_configuration_allows_are_refused(thinker: StageLLM) -> None:
    many = Media(videos=(synthetic_video(2, fps=2.0),) * 4)
    asked = OmniRequest("many", prompt_text("+".join(["video"] * 4)), many)
    with pytest.raises(RequestError, match=r"the model cannot take the prompt's media \(video: 4\)"):
        await think(thinker, asked)


async def test_videos_of_which_only_some_have_audio_are_refused(thinker: StageLLM) -> None:
    mixed = Media(videos=(synthetic_video(4, fps=2.0), synthetic_video(4, fps=2.0, audio_s=2.0)))
    with pytest.raises(RequestError, match="some videos come with their audio and some without"):
        await think(thinker, OmniRequest("mixed", prompt_text("video+slow"), mixed))


async def test_video_that_is_longer_than_a_prompt_is_refused(thinker: StageLLM) -> None:
    asked = OmniRequest("long", prompt_text("video"), Media(videos=(synthetic_video(32, fps=2.0),)))
    with pytest.raises(RequestError, match=r"length is 2047 tokens, but the prompt has 2\d\d\d tokens, media included"):
        await think(thinker, asked)


async def test_sound_of_a_video_that_has_no_frame_is_refused(thinker: StageLLM) -> None:
    video = Video(synthetic_video(2, fps=2.0).frames, 2.0, np.zeros(160, np.float32))
    with pytest.raises(RequestError, match="a sound has 160 samples; send at least"):
        await answer(thinker, "short", video)


def test_encoder_cache_holds_the_video_that_the_memory_plan_counts(thinker: StageLLM) -> None:
    assert thinker.llm.input_processor.mm_encoder_cache_size == MAX_MODEL_LEN
