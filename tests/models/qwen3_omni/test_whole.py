"""The three engines in one process say and speak what transformers' `generate` does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from omni_cluster.config.loader import STAGE_CONFIGS, load_config
from omni_cluster.engine.omni_llm import AsyncOmniLLM
from omni_cluster.models.registry import known_families
from omni_cluster.types.codes import Codes
from omni_cluster.types.inputs import KnownOutput, Media, OmniRequest
from omni_cluster.types.outputs import OmniRequestOutput
from tests.engine.stages import shortened
from tests.models.qwen3_omni.thinker_reference import media_of, prompt_text
from tests.models.qwen3_omni.whole_reference import MAX_CODES, MAX_TOKENS, Reference, Spoken
from tests.reference import synthetic_video

pytestmark = pytest.mark.parity
KINDS = ("text", "audio", "image", "audio+image", "video", "slow", "image+video+audio", "odd")
HEARD_KINDS = ("heard", "odd-heard", "audio+heard+image")
"""Videos with their sound."""
VOICES = ("ethan", "chelsie")


@pytest.fixture(scope="module")
def reference(qwen3_folder: Path, qwen3_reference: Any) -> Reference:
    return Reference(qwen3_folder, qwen3_reference)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def omni(forked_engines: None, qwen3_folder: Path) -> AsyncIterator[AsyncOmniLLM]:
    config = load_config(STAGE_CONFIGS / "qwen3_omni_tiny.yaml", known_families=known_families())
    stages = [shortened(stage) for stage in config.stages]
    running = AsyncOmniLLM(config.model_copy(update={"stages": stages, "model": str(qwen3_folder)}))
    await running.start()
    yield running
    await running.shutdown()


def asked(kind: str, voice: str, **fields: Any) -> OmniRequest:
    sampling = {"thinker": {"max_tokens": MAX_TOKENS}, "talker": {"max_tokens": MAX_CODES}}
    return OmniRequest(
        f"{kind}-{voice}-{len(fields)}", prompt_text(kind), media_of(kind), True, voice, sampling, **fields
    )


def assert_said(made: OmniRequestOutput, wanted: Spoken) -> None:
    assert list(made.token_ids) == wanted.token_ids
    assert made.codes is not None and made.audio is not None
    np.testing.assert_array_equal(made.codes.values, wanted.codes)
    assert made.audio.start == 0
    np.testing.assert_allclose(made.audio.samples, wanted.sound, atol=1e-4, rtol=0)


def two_of_each(seed: int) -> tuple[str, Media]:
    """A prompt and its media in an order of their own. Every third seed has each medium twice, the others two of unlike
    lengths, sizes and rates; odd seeds have videos with their sound.
    """
    dice, noise = random.Random(seed), np.random.RandomState(seed)
    film = "heard" if seed % 2 else "video"
    kinds = ["audio", "image", film] * 2
    dice.shuffle(kinds)
    made: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for kind in kinds:
        if seed % 3 == 0 and made[kind]:
            made[kind] *= 2
        elif kind == "audio":
            made[kind].append(noise.uniform(-0.3, 0.3, dice.randint(400, 40_000)).astype(np.float32))
        elif kind == "image":
            pixels = noise.randint(0, 255, (dice.randint(4, 70), dice.randint(8, 70), 3))
            made[kind].append(Image.fromarray(pixels.astype(np.uint8)))
        else:
            rate, sound_s = dice.choice([0.3, 0.7, 1.0, 1.5, 2.0, 3.3]), dice.uniform(0.03, 4) if seed % 2 else None
            made[kind].append(synthetic_video(2 * dice.randint(1, 3), rate, sound_s, seed=len(made[kind])))
    return prompt_text("+".join(kinds)), Media(*(tuple(made[kind]) for kind in ("audio", "image", film)))


async def test_two_of_each_kind_in_any_order_alone_and_at_once(omni: AsyncOmniLLM, reference: Reference) -> None:
    sampling = {"thinker": {"max_tokens": MAX_TOKENS}, "talker": {"max_tokens": MAX_CODES}}
    asked = [OmniRequest(f"mix-{n}", *two_of_each(n), True, "aiden", sampling) for n in range(6)]
    wanted = [reference.reply(each.prompt, each.media, "aiden") for each in asked]
    for each, spoken in zip(asked, wanted, strict=True):
        assert_said(await omni.generate(each), spoken)
    streams = [replace(each, request_id=f"{each.request_id}-streamed", streams_audio=True) for each in asked]
    for made, spoken in zip(await asyncio.gather(*map(omni.generate, streams)), wanted, strict=True):
        assert_said(made, spoken)


@pytest.mark.parametrize("kind", [*KINDS, *HEARD_KINDS])
async def test_text_codes_and_sound_are_transformers(omni: AsyncOmniLLM, reference: Reference, kind: str) -> None:
    assert_said(await omni.generate(asked(kind, "ethan")), reference.speak(kind, "ethan"))


async def test_streams_at_once_say_what_each_says_alone(omni: AsyncOmniLLM, reference: Reference) -> None:
    pairs = [(kind, voice) for kind in (*KINDS, *HEARD_KINDS) for voice in VOICES]
    made = await asyncio.gather(*(omni.generate(asked(*pair, streams_audio=True)) for pair in pairs))
    for output, pair in zip(made, pairs, strict=True):
        assert_said(output, reference.speak(*pair))


async def thinker_steps(omni: AsyncOmniLLM) -> int:
    return (await omni.counts())["thinker"]["steps"]


async def test_a_reply_that_is_given_is_spoken_and_the_thinker_computes_nothing(
    omni: AsyncOmniLLM, reference: Reference
) -> None:
    reply, before = "Hello there.", await thinker_steps(omni)
    made = await omni.generate(replace(asked("text", "ethan", reply=reply), request_id="given"))
    reply_ids = omni.bound.family.tokenize(reply, False)
    assert made.text == reply and list(made.token_ids) == reply_ids
    wanted = reference.spoken(prompt_text("text"), reply_ids, "ethan")
    assert wanted.token_ids[:-1] == reply_ids
    assert made.codes is not None
    np.testing.assert_array_equal(made.codes.values, wanted.codes)
    assert await thinker_steps(omni) == before


@pytest.mark.parametrize("codes", [0, 7])
async def test_an_answer_without_media_that_is_all_there_is_spoken_and_the_thinker_computes_nothing(
    omni: AsyncOmniLLM, reference: Reference, codes: int
) -> None:
    """As of a request whose talker is lost when the thinker has ended."""
    wanted, before = reference.speak("text", "ethan"), await thinker_steps(omni)
    known = {"thinker": KnownOutput(tuple(wanted.token_ids), "length")}
    if codes:
        known["talker"] = KnownOutput(codes=Codes.of(0, wanted.codes[:codes]))
    made = await omni.generate(replace(asked("text", "ethan", known=known), request_id=f"ended-{codes}"))
    assert_said(made, wanted)
    assert await thinker_steps(omni) == before


async def test_without_sound_the_text_is_the_same(omni: AsyncOmniLLM, reference: Reference) -> None:
    request = replace(asked("audio", "ethan"), request_id="silent", wants_audio=False)
    made = await omni.generate(request)
    assert list(made.token_ids) == reference.speak("audio", "ethan").token_ids
    assert made.codes is None and made.audio is None
