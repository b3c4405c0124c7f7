"""Frames from vLLM are transformers', all codebooks of them, whatever happens to their requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from omni_cluster.models.checkpoint_files import read_config
from omni_cluster.models.qwen3_omni.talker_ids import TalkerIds
from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import KnownOutput, OmniRequest
from omni_cluster.types.outputs import StageChunk
from omni_cluster.vllm_engine.stage_llm import StageLLM
from tests.engine.stages import Feed, at_once, begun_at_once, collect, until_counts, until_free
from tests.models.qwen3_omni.spoken import KINDS, MAX_CODES, MAX_TOKENS, Speaker, Spoken
from tests.models.qwen3_omni.stages import talking

pytestmark = pytest.mark.parity
ONE_BY_ONE = {"logprobs": 0}
"""A step then gives one code of the request."""
SEEDED = {"temperature": 0.9, "top_k": 50, "seed": 7}
CROWD = [(kind, voice) for voice in ("ethan", "chelsie") for kind in KINDS]

Frames = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def speaker(qwen3_reference: Any, qwen3_folder: Path) -> Speaker:
    return Speaker(qwen3_reference, qwen3_folder)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def talker(forked_engines: None, qwen3_folder: Path) -> AsyncIterator[StageLLM]:
    """Four codes a step."""
    async with talking(qwen3_folder, max_decode_steps=4) as stage:
        yield stage


def asked(request_id: str, voice: str = "ethan", **sampling: Any) -> OmniRequest:
    return OmniRequest(request_id, "", voice=voice, sampling={"talker": sampling})


async def frames(talker: StageLLM, request: OmniRequest, spoken: Spoken) -> Frames:
    made = await collect(talker.generate(request, at_once(spoken.chunks())))
    assert made.finish_reason == "length"
    return frames_of(made)


def frames_of(made: StageChunk) -> Frames:
    assert made.codes is not None and made.codes.start == 0 and made.rows is None
    return [tuple(frame) for frame in made.codes.values.tolist()]


def assert_said(made: Frames, spoken: Spoken) -> None:
    """The last token of a full length has no residual codes to transformers, and is left out."""
    assert tuple(made) == spoken.frames


def test_no_token_of_the_reference_is_as_likely_as_another(speaker: Speaker) -> None:
    """Else rounding would choose; float32 differs by less."""
    assert min(speaker.speak(kind, voice).least_margin for kind, voice in CROWD) > 5e-4


def test_frames_of_odd_rates_are_at_positions_between_whole_ones(speaker: Speaker) -> None:
    assert [kind for kind in KINDS if speaker.speak(kind).following % 1] == ["odd", "odd turns"]


@pytest.mark.parametrize("sampling", [{}, ONE_BY_ONE], ids=["four a step", "one a step"])
@pytest.mark.parametrize("kind", KINDS)
async def test_frames_are_transformers_through_chunked_prefill(
    talker: StageLLM, speaker: Speaker, kind: str, sampling: dict[str, Any]
) -> None:
    spoken, before = speaker.speak(kind), (await talker.counts())["steps"]
    assert_said(await frames(talker, asked(f"alone-{kind}-{len(sampling)}", **sampling), spoken), spoken)
    steps = (await talker.counts())["steps"] - before
    assert steps >= MAX_CODES if sampling else steps < MAX_CODES / 2


async def crowd(talker: StageLLM, speaker: Speaker, **sampling: Any) -> list[Frames]:
    """Of requests at once, more than fit, which end at different steps."""
    before = (await talker.counts())["preemptions"]
    made = [
        collect(
            talker.generate(
                asked(f"crowd-{number}-{sampling}", voice, **sampling, max_tokens=MAX_CODES - 1 - number % 12),
                at_once(speaker.speak(kind, voice).chunks()),
            )
        )
        for number, (kind, voice) in enumerate(CROWD)
    ]
    chunks = await begun_at_once(talker, made)
    assert (await talker.counts())["preemptions"] > before
    await until_free(talker)
    return [frames_of(chunk) for chunk in chunks]


@pytest.mark.parametrize("sampling", [{}, ONE_BY_ONE], ids=["four a step", "one a step"])
async def test_a_crowd_of_which_some_are_preempted_says_the_same(
    talker: StageLLM, speaker: Speaker, sampling: dict[str, Any]
) -> None:
    for (kind, voice), made in zip(CROWD, await crowd(talker, speaker, **sampling), strict=True):
        assert len(made) > MAX_CODES / 2 and tuple(made) == speaker.speak(kind, voice).frames[: len(made)]


async def test_seeded_frames_hang_on_no_other_request(talker: StageLLM, speaker: Speaker) -> None:
    for (kind, voice), made in zip(CROWD, await crowd(talker, speaker, **SEEDED), strict=True):
        spoken = speaker.speak(kind, voice)
        alone = await frames(talker, asked(f"seeded-{kind}-{voice}", voice, **SEEDED, **ONE_BY_ONE), spoken)
        assert made == alone[: len(made)] and tuple(alone[:-1]) != spoken.frames


async def test_a_seed_decides_all_codebooks(talker: StageLLM, speaker: Speaker) -> None:
    spoken = speaker.speak("text")
    first, again, other = [
        await frames(talker, asked(f"seed-{number}", **{**SEEDED, "seed": seed}), spoken)
        for number, seed in enumerate((7, 7, 8))
    ]
    assert first == again
    assert all(a != b for a, b in zip(zip(*first, strict=True), zip(*other, strict=True), strict=True))


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
async def test_a_request_that_is_begun_again_goes_on_behind_what_is_known(
    talker: StageLLM, speaker: Speaker, sampling: dict[str, Any]
) -> None:
    request, spoken = asked(f"whole-{len(sampling)}", **sampling), speaker.speak("turns")
    whole = (await collect(talker.generate(request, at_once(spoken.chunks())))).codes
    assert whole is not None
    for cut in (1, 13, MAX_CODES - 1):
        known = {"talker": KnownOutput(codes=whole.between(0, cut))}
        again = replace(request, request_id=f"again-{len(sampling)}-{cut}", known=known)
        assert (await collect(talker.generate(again, at_once(spoken.chunks())))).codes == whole


async def test_a_token_that_is_missing_holds_its_request_and_no_other(talker: StageLLM, speaker: Speaker) -> None:
    spoken = speaker.speak("audio")
    chunks, feed = spoken.chunks(), Feed()
    made = asyncio.create_task(collect(talker.generate(asked("late"), feed.read())))
    feed.give(*chunks[:4])
    await until_counts(talker, held=1)
    assert_said(await frames(talker, asked("beside"), speaker.speak("image")), speaker.speak("image"))
    assert not made.done()
    for chunk in chunks[4:]:
        await until_counts(talker, held=1, running=1)
        feed.give(chunk)
    feed.end()
    assert_said(frames_of(await made), spoken)
    await until_free(talker)


async def test_tokens_that_come_one_at_a_time_under_preemption_say_the_same(talker: StageLLM, speaker: Speaker) -> None:
    before, feeds = (await talker.counts())["preemptions"], [Feed() for _ in CROWD]
    made = [
        asyncio.create_task(collect(talker.generate(asked(f"drip-{number}", voice), feed.read())))
        for number, ((_, voice), feed) in enumerate(zip(CROWD, feeds, strict=True))
    ]
    for number in range(MAX_TOKENS):
        for (kind, voice), feed in zip(CROWD, feeds, strict=True):
            feed.give(speaker.speak(kind, voice).chunks()[number])
        await talker.counts()  # a round trip, in which the engine gets on
    for feed in feeds:
        feed.end()
    for (kind, voice), chunk in zip(CROWD, await asyncio.gather(*made), strict=True):
        assert_said(frames_of(chunk), speaker.speak(kind, voice))
    assert (await talker.counts())["preemptions"] > before
    await until_free(talker)


async def test_speech_begins_with_the_first_token(talker: StageLLM, speaker: Speaker) -> None:
    spoken = speaker.speak("image")
    feed = Feed(spoken.chunks()[0])
    chunks = talker.generate(asked("first"), feed.read())
    assert frames_of(await anext(chunks)) == [spoken.frames[0]]
    await chunks.aclose()
    await until_free(talker)


async def test_a_whole_reply_at_once_says_the_same(talker: StageLLM, speaker: Speaker) -> None:
    spoken = speaker.speak("video")
    made = await collect(talker.generate(asked("whole"), at_once([StageChunk.joined(spoken.chunks())])))
    assert_said(frames_of(made), spoken)


async def test_a_reply_of_two_tokens_is_spoken(talker: StageLLM, speaker: Speaker) -> None:
    spoken = speaker.speak("text", max_tokens=2)
    assert len(spoken.reply_ids) == 2 < MAX_TOKENS
    assert_said(await frames(talker, asked("brief"), spoken), spoken)


@pytest.mark.parametrize("said_with_it", [True, False])
async def test_a_reply_of_one_token_is_not_spoken(talker: StageLLM, speaker: Speaker, said_with_it: bool) -> None:
    """Where the end comes behind the token, one code has been made of it."""
    first = speaker.speak("text").chunks()[0]
    ends = [msgspec.structs.replace(first, finish_reason="stop")]
    chunks = ends if said_with_it else [first, StageChunk(1, finish_reason="stop")]
    made = await collect(talker.generate(asked(f"mute-{said_with_it}"), at_once(chunks)))
    assert made.finish_reason == "stop" and len(made.codes or ()) <= (0 if said_with_it else 1)
    await until_free(talker)


async def test_the_end_of_speech_has_no_frame(talker: StageLLM, speaker: Speaker, qwen3_folder: Path) -> None:
    codec = TalkerIds.from_config(read_config(qwen3_folder)).codec
    asks = {"logit_bias": {codec.eos: 100.0}, "min_tokens": 5}
    made = await collect(talker.generate(asked("ended", **asks), at_once(speaker.speak("text").chunks())))
    assert made.finish_reason == "stop" and tuple(frames_of(made)) == speaker.speak("text").frames[:5]


async def test_marks_of_the_codec_are_never_said(talker: StageLLM, speaker: Speaker, qwen3_folder: Path) -> None:
    codec = TalkerIds.from_config(read_config(qwen3_folder)).codec
    asks = {"logit_bias": {codec.pad: 100.0, codec.bos: 100.0, codec.unspoken: 100.0}}
    spoken = speaker.speak("text")
    assert_said(await frames(talker, asked("marks", **asks), spoken), spoken)


async def test_without_a_voice_the_familys_own_speaks(talker: StageLLM, speaker: Speaker) -> None:
    spoken = speaker.speak("text", "aiden")
    assert_said(await frames(talker, OmniRequest("voiceless", ""), spoken), spoken)


async def test_a_voice_that_is_not_there_is_refused(talker: StageLLM, speaker: Speaker) -> None:
    with pytest.raises(RequestError, match="voice is 'Dylan'; use one of ethan, aiden, chelsie"):
        await collect(talker.generate(asked("dylan", "Dylan"), at_once(speaker.speak("text").chunks())))
    await until_free(talker)
