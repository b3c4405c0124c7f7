"""Videos, with and without their sound: thinker and whole pipeline give the reference's answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
import torch

from omni_cluster.engine.omni_llm import AsyncOmniLLM
from omni_cluster.models.stage import Stage
from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import KnownOutput, Media, OmniRequest, Video
from tests.codes import codes_of, known_codes
from tests.engine.stages import (
    MAX_TOKENS,
    collect,
    pipeline_config,
    request,
    talker_stage,
    thinker_stage,
    until_free,
    whole_rows,
)
from tests.reference import (
    VIDEO_KINDS,
    Reference,
    SpeechReference,
    ThinkerReference,
    media,
    prompt_text,
    synthetic_video,
    videos,
)

pytestmark = [pytest.mark.parity, pytest.mark.full]
MAX_MODEL_LEN = 2048
MAX_NUM_BATCHED_TOKENS = 96
LIMITS = {"audio": 2, "image": 2, "video": 3}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pipeline() -> AsyncIterator[AsyncOmniLLM]:
    """Prompts of videos need several steps, which cut their items anywhere."""
    thinker = thinker_stage(
        max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS, limit_mm_per_prompt=LIMITS
    )
    omni = AsyncOmniLLM(pipeline_config(thinker, talker_stage(max_model_len=MAX_MODEL_LEN)))
    await omni.start()
    yield omni
    await omni.shutdown()


@pytest.fixture
def thinker(pipeline: AsyncOmniLLM) -> Stage:
    return pipeline._stages["thinker"]


@pytest.fixture(scope="module")
def spoken(reference: Reference) -> dict[str, SpeechReference]:
    return {k: reference.speech(prompt_text(k), *media(k), videos=videos(k)) for k in VIDEO_KINDS}


@pytest.fixture(scope="module")
def thought(reference: Reference) -> dict[str, ThinkerReference]:
    return {k: thinks(reference, k, videos(k)) for k in VIDEO_KINDS}


def thinks(reference: Reference, kind: str, seen: list[Video]) -> ThinkerReference:
    return reference.thinker(prompt_text(kind), *media(kind), max_new_tokens=MAX_TOKENS, videos=seen)


async def answer(thinker: Stage, request_id: str, *seen: Video, wants_audio: bool = True) -> list[int]:
    asked = OmniRequest(request_id, prompt_text("video"), Media(videos=seen), wants_audio=wants_audio)
    return list((await collect(thinker.generate(asked, None))).token_ids)


@pytest.mark.parametrize("kind", VIDEO_KINDS)
async def test_rows_are_the_references_through_chunked_prefill(
    thinker: Stage, thought: dict[str, ThinkerReference], kind: str
) -> None:
    made, wanted = await collect(thinker.generate(request(f"rows-{kind}", kind), None)), thought[kind]
    assert len(wanted.prompt_ids) > 2 * MAX_NUM_BATCHED_TOKENS
    assert list(made.prompt_token_ids or ()) == wanted.prompt_ids
    assert made.rows is not None and made.rows.positions is not None
    assert np.array_equal(made.rows.positions, wanted.positions.numpy())
    assert list(made.token_ids) == wanted.token_ids
    torch.testing.assert_close(await whole_rows(made.rows), wanted.rows, atol=1e-4, rtol=0)


@pytest.mark.parametrize("at_once", [False, True])
async def test_spoken_answers_are_the_references(
    pipeline: AsyncOmniLLM, spoken: dict[str, SpeechReference], at_once: bool
) -> None:
    asked = [request(f"speech-{kind}-{at_once}", kind) for kind in VIDEO_KINDS]
    if at_once:
        made = list(await asyncio.gather(*map(pipeline.generate, asked)))
    else:
        made = [await pipeline.generate(one) for one in asked]
    for kind, output in zip(VIDEO_KINDS, made, strict=True):
        wanted = spoken[kind]
        assert list(output.prompt_token_ids) == wanted.prompt_ids
        assert list(output.token_ids) == wanted.token_ids
        assert codes_of(output) == wanted.codes
        assert output.audio is not None
        np.testing.assert_allclose(output.audio.samples, wanted.waveform, atol=1e-4, rtol=0)
    await until_free(pipeline._stages["thinker"])


@pytest.mark.parametrize("kind", VIDEO_KINDS[-2:])
async def test_spoken_answers_that_are_begun_again_are_the_references(
    pipeline: AsyncOmniLLM, spoken: dict[str, SpeechReference], kind: str
) -> None:
    """Frames that outlast their sound are at later positions than the text behind them, known or new."""
    wanted = spoken[kind]
    known = {
        "thinker": KnownOutput(tuple(wanted.token_ids[: MAX_TOKENS // 2])),
        "talker": known_codes(wanted.codes[:5]),
    }
    made = await pipeline.generate(request(f"again-{kind}", kind, known=known))
    assert list(made.token_ids) == wanted.token_ids
    assert codes_of(made) == wanted.codes
    assert made.audio is not None
    np.testing.assert_allclose(made.audio.samples, wanted.waveform, atol=1e-4, rtol=0)


@pytest.mark.parametrize("wants_audio", [True, False])
async def test_the_same_frames_at_another_rate_or_with_other_sound_are_another_video(
    thinker: Stage, reference: Reference, wants_audio: bool
) -> None:
    plain, heard = synthetic_video(4, fps=2.0), synthetic_video(4, fps=2.0, audio_s=2.5)
    silent = Video(plain.frames, plain.fps, np.zeros(40_000, np.float32))
    changed = [plain, Video(plain.frames, fps=0.1), heard, silent]
    wanted = [thinks(reference, "video", [video]).token_ids for video in changed]
    assert len(set(map(tuple, wanted))) == len(wanted)
    for turn in range(2):
        for index, video in enumerate(changed):
            name = f"again-{wants_audio}-{turn}-{index}"
            assert await answer(thinker, name, video, wants_audio=wants_audio) == wanted[index]


async def test_videos_of_which_only_some_have_audio_are_refused(thinker: Stage) -> None:
    mixed = synthetic_video(4, fps=2.0), synthetic_video(4, fps=2.0, audio_s=2.0)
    asked = OmniRequest("mixed", prompt_text("video+slow"), Media(videos=mixed))
    with pytest.raises(RequestError, match="some videos come with their audio and some without"):
        await collect(thinker.generate(asked, None))


async def test_more_videos_than_the_configuration_allows_are_refused(thinker: Stage) -> None:
    video = synthetic_video(2, fps=2.0)
    asked = OmniRequest("many", prompt_text("+".join(["video"] * 4)), Media(videos=(video,) * 4))
    with pytest.raises(RequestError, match=r"the model cannot take the prompt's media \(video: 4\)"):
        await collect(thinker.generate(asked, None))


async def test_video_that_is_longer_than_a_prompt_is_refused(thinker: Stage) -> None:
    asked = OmniRequest("long", prompt_text("video"), Media(videos=(synthetic_video(32, fps=2.0),)))
    with pytest.raises(RequestError, match=r"length is 2047 tokens, but the prompt has 22.. tokens, media included"):
        await collect(thinker.generate(asked, None))


async def test_sound_of_a_video_that_has_no_token_is_refused(thinker: Stage) -> None:
    video = Video(synthetic_video(2, fps=2.0).frames, 2.0, np.zeros(160, np.float32))
    with pytest.raises(RequestError, match="the audio of a video is too short"):
        await answer(thinker, "short", video)


def test_encoder_cache_holds_the_video_that_the_memory_plan_counts(thinker: Stage) -> None:
    assert thinker.llm.input_processor.mm_encoder_cache_size == MAX_MODEL_LEN  # type: ignore[attr-defined]
