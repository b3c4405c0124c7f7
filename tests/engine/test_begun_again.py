"""A request that was lost on other replicas goes on here, exactly behind what is known of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from omni_cluster.engine.omni_llm import AsyncOmniLLM
from omni_cluster.models.qwen2_5_omni.special_ids import SpecialIds
from omni_cluster.models.stage import Stage
from omni_cluster.types.inputs import KnownOutput, OmniRequest
from omni_cluster.types.outputs import StageChunk
from omni_cluster.types.rows import Rows
from tests.codes import codes_of, known_codes
from tests.engine.one_by_one import give_one_by_one
from tests.engine.stages import (
    MAX_CODES,
    MAX_TOKENS,
    Feed,
    Speak,
    at_once,
    begun_at_once,
    request,
    thinker_chunks,
    until_free,
)
from tests.models.qwen2_5_omni.likeness import STREAMING_SNR_DB, snr_db
from tests.reference import Reference, media, prompt_text

pytestmark = pytest.mark.parity

Chunks = list[StageChunk]
Sampling = dict[str, Any]

LONG = "audio+image"
"""Its prompt takes several steps of the tight engines."""
UNCACHED: Sampling = {"skip_reading_prefix_cache": True}
SAMPLINGS: Mapping[str, Sampling] = {
    "greedy": {},
    "greedy, penalised": {"repetition_penalty": 1.3, "frequency_penalty": 1.0, "presence_penalty": 0.5},
    "seeded": {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "seed": 2, "repetition_penalty": 1.05},
    "seeded, all": {"temperature": 1.2, "seed": 3, "frequency_penalty": 0.8},
}
SOME_SAMPLINGS = [
    pytest.param(name, marks=() if name in ("greedy, penalised", "seeded") else pytest.mark.full) for name in SAMPLINGS
]
TRIES = 20


@pytest.fixture(autouse=True)
def outputs_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    give_one_by_one(monkeypatch)


async def said(stage: Stage, asked: OmniRequest, upstream: AsyncIterator[StageChunk] | None = None) -> Chunks:
    return [chunk async for chunk in stage.generate(asked, upstream)]


def begun_again(asked: OmniRequest, name: str, **known: KnownOutput) -> OmniRequest:
    return replace(asked, request_id=name, known=known)


def until_chunk(chunks: Chunks, number: int) -> KnownOutput:
    """What is known when the first `number` chunks were read."""
    read = StageChunk.joined(chunks[:number])
    return KnownOutput(read.token_ids, read.finish_reason)


def cuts(chunks: Chunks) -> list[int]:
    """Behind the first token, in the middle, before the last one, and at the end."""
    with_tokens = [number for number, chunk in enumerate(chunks, start=1) if chunk.token_ids]
    return [with_tokens[0], with_tokens[len(with_tokens) // 2], with_tokens[-2], len(chunks)]


def assert_goes_on(again: Chunks, chunks: Chunks, cut: int) -> None:
    """Known tokens without text first, then all that `chunks` say from number `cut` on; rows from the start."""
    known, rest, whole = StageChunk.joined(chunks[:cut]), chunks[cut:], StageChunk.joined(chunks)
    first, made = again[0], StageChunk.joined(again)
    assert (first.token_start, first.token_ids, first.text, first.choices) == (0, known.token_ids, "", ())
    assert all(after.token_start == before.token_end for before, after in pairwise(again))
    assert (made.token_ids, made.finish_reason) == (whole.token_ids, whole.finish_reason)
    assert made.text == "".join(chunk.text for chunk in rest)
    assert_choices(made, [choice for chunk in rest for choice in chunk.choices])
    if whole.rows is None:
        assert made.rows is None
        return
    assert made.prompt_token_ids == whole.prompt_token_ids
    assert_rows(made.rows, whole.rows)


def assert_rows(made: Rows | None, wanted: Rows) -> None:
    assert made is not None and (made.start, made.raw.shape) == (0, wanted.raw.shape)
    assert made.positions is not None and np.array_equal(made.positions, wanted.positions)
    torch.testing.assert_close(made.tensor(), wanted.tensor(), atol=1e-4, rtol=0)


def assert_choices(made: StageChunk, wanted: Sequence[Any]) -> None:
    assert [choice.sampled.token for choice in made.choices] == [choice.sampled.token for choice in wanted]
    for choice, like in zip(made.choices, wanted, strict=True):
        logprobs = [[one.logprob for one in (each.sampled, *each.likeliest)] for each in (choice, like)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


# ---------------------------------------------------------------- the thinker


@pytest.fixture(scope="module")
def thinker(tight_thinker: Stage) -> Stage:
    return tight_thinker


async def assert_thinker_goes_on(thinker: Stage, asked: OmniRequest, *, all_cuts: bool = False) -> Chunks:
    """Cut at several places, one after another."""
    chunks = await said(thinker, asked)
    for cut in range(1, len(chunks) + 1) if all_cuts else cuts(chunks):
        again = begun_again(asked, f"{asked.request_id}-{cut}", thinker=until_chunk(chunks, cut))
        assert_goes_on(await said(thinker, again), chunks, cut)
    await until_free(thinker)
    return chunks


@pytest.mark.parametrize("name", SOME_SAMPLINGS)
async def test_text_goes_on(thinker: Stage, name: str) -> None:
    asked = request(f"text-{name}", sampling={"thinker": {**UNCACHED, **SAMPLINGS[name]}})
    chunks = await assert_thinker_goes_on(thinker, asked)
    assert chunks[-1].token_end == MAX_TOKENS


@pytest.mark.parametrize("sampling", [UNCACHED, {}], ids=["computed", "cached"])
async def test_a_prompt_of_several_steps_with_media(thinker: Stage, sampling: Sampling) -> None:
    """Cached: known tokens behind the prompt are read from the prefix cache too, with their rows."""
    long = {**sampling, "max_tokens": 60}
    await assert_thinker_goes_on(thinker, request(f"long-{len(sampling)}", LONG, sampling={"thinker": long}))


async def test_a_prompt_with_media_that_was_lost_half_read_is_read_again(thinker: Stage) -> None:
    """Nothing was said yet, and rows of its first part were there; parts come apart where they are read in time."""
    asked = request("half", LONG, sampling={"thinker": UNCACHED})
    whole = StageChunk.joined(await said(thinker, asked))
    for attempt in range(TRIES):
        async with contextlib.aclosing(thinker.generate(replace(asked, request_id=f"half-{attempt}"))) as lost:
            part = await anext(lost)
        if part.only_rows:
            break
    assert part.only_rows and part.rows is not None and part.rows.end < len(whole.prompt_token_ids or ())
    assert_goes_on_from_nothing(StageChunk.joined(await said(thinker, begun_again(asked, "half-again1"))), whole)
    await until_free(thinker)


def assert_goes_on_from_nothing(made: StageChunk, whole: StageChunk) -> None:
    assert (made.token_ids, made.text, made.finish_reason) == (whole.token_ids, whole.text, whole.finish_reason)
    assert made.prompt_token_ids == whole.prompt_token_ids and whole.rows is not None
    assert_rows(made.rows, whole.rows)


async def test_logprobs_are_those_of_new_tokens(thinker: Stage) -> None:
    sampling = {"logprobs": 2, "repetition_penalty": 1.3}
    chunks = await assert_thinker_goes_on(thinker, request("logprobs", sampling={"thinker": sampling}), all_cuts=True)
    assert len(StageChunk.joined(chunks).choices) == MAX_TOKENS


async def test_an_end_token_comes_when_the_least_tokens_are_there(thinker: Stage, reference: Reference) -> None:
    end = reference.processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    sampling = {"min_tokens": 9, "logit_bias": {end: 1e4}}
    chunks = await assert_thinker_goes_on(thinker, request("least", sampling={"thinker": sampling}), all_cuts=True)
    assert (chunks[-1].token_end, chunks[-1].finish_reason) == (10, "stop")


@pytest.mark.parametrize("is_said", [False, True])
async def test_a_stop_string_that_begins_before_the_cut(thinker: Stage, is_said: bool) -> None:
    """Of the plain answer: its last letters before the middle, and the first ones behind it."""
    plain = await said(thinker, request(f"plain-{is_said}", "audio"))
    text, middle = StageChunk.joined(plain).text, len("".join(chunk.text for chunk in plain[: len(plain) // 2]))
    sampling = {"stop": [text[middle - 2 : middle + 3]], "include_stop_str_in_output": is_said}
    asked = request(f"stop-{is_said}", "audio", sampling={"thinker": sampling})
    chunks = await assert_thinker_goes_on(thinker, asked, all_cuts=True)
    assert chunks[-1].finish_reason == "stop" and 1 < chunks[-1].token_end < MAX_TOKENS


async def test_a_word_that_may_not_come_and_begins_before_the_cut(thinker: Stage, reference: Reference) -> None:
    """Of the plain answer: two tokens that its tokenizer makes of their text, of which the second may not follow."""
    plain = StageChunk.joined(await said(thinker, request("plain-word", "audio"))).token_ids
    tokenizer = reference.processor.tokenizer
    texts = {pair: tokenizer.decode(pair) for pair in pairwise(plain[2:])}
    pair, word = next((pair, text) for pair, text in texts.items() if tuple(tokenizer.encode(text)) == pair)
    asked = request("word", "audio", sampling={"thinker": {"bad_words": [word]}})
    chunks = await assert_thinker_goes_on(thinker, asked, all_cuts=True)
    token_ids = StageChunk.joined(chunks).token_ids
    first = list(pairwise(plain)).index(pair)
    assert token_ids[: first + 1] == plain[: first + 1] and pair not in pairwise(token_ids)


async def test_without_sound_nothing_is_computed_of_a_text_that_had_ended(thinker: Stage) -> None:
    asked = request("mute", wants_audio=False)
    chunks = await said(thinker, asked)
    before = (await thinker.counts())["steps"]
    again = await said(thinker, begun_again(asked, "mute-again", thinker=until_chunk(chunks, len(chunks))))
    assert (await thinker.counts())["steps"] == before
    assert_goes_on(again, chunks, len(chunks))
    for cut in cuts(chunks)[:-1]:
        known = until_chunk(chunks, cut)
        assert_goes_on(await said(thinker, begun_again(asked, f"mute-{cut}", thinker=known)), chunks, cut)


async def test_of_an_answer_whose_codes_had_ended_no_rows_are_made(thinker: Stage) -> None:
    asked, codes = request("spoken"), known_codes((1, 2, 3), "length")
    chunks = await said(thinker, asked)
    for cut in cuts(chunks):
        known = until_chunk(chunks, cut)
        again = await said(thinker, begun_again(asked, f"spoken-{cut}", thinker=known, talker=codes))
        assert all(chunk.rows is None for chunk in again)
        assert_goes_on(again, [chunk.without_rows() for chunk in chunks], cut)
    await until_free(thinker)


async def test_a_given_reply_has_its_rows_again_and_no_text(thinker: Stage) -> None:
    asked = OmniRequest("given", prompt_text("text"), reply="Hello there, my friend.")
    (chunk,) = await said(thinker, asked)
    known = until_chunk([chunk], 1)
    (again,) = await said(thinker, begun_again(asked, "given-again", thinker=known))
    assert (again.token_start, again.token_ids, again.text, again.finish_reason) == (0, chunk.token_ids, "", "stop")
    assert chunk.rows is not None
    assert_rows(again.rows, chunk.rows)
    before = (await thinker.counts())["steps"]
    codes = known_codes((1, 2, 3), "length")
    (end,) = await said(thinker, begun_again(asked, "given-spoken", thinker=known, talker=codes))
    assert (end.finish_reason, end.rows, end.text) == ("stop", None, "")
    assert (await thinker.counts())["steps"] == before


async def test_beside_neighbours_and_under_preemption(thinker: Stage) -> None:
    long = {"max_tokens": 100}
    asked = {
        name: request(f"crowd-{name}", "audio", sampling={"thinker": {**long, **each}})
        for name, each in SAMPLINGS.items()
    }
    alone = {name: await said(thinker, each) for name, each in asked.items()}
    begun = [(name, cut) for name, chunks in alone.items() for cut in cuts(chunks)[:2]]
    before = (await thinker.counts())["preemptions"]
    made = await begun_at_once(
        thinker,
        [
            said(thinker, begun_again(asked[name], f"crowd-{name}-{cut}", thinker=until_chunk(alone[name], cut)))
            for name, cut in begun
        ],
    )
    assert (await thinker.counts())["preemptions"] > before
    for again, (name, cut) in zip(made, begun, strict=True):
        assert_goes_on(again, alone[name], cut)
    await until_free(thinker)


# ----------------------------------------------------------------- the talker


@pytest.fixture(scope="module")
def talker(tight_talker: Stage) -> Stage:
    return tight_talker


@pytest.fixture(scope="module")
def fed(reference: Reference) -> dict[str, Chunks]:
    kinds = ("text", LONG)
    return {
        kind: thinker_chunks(reference.thinker(prompt_text(kind), *media(kind), max_new_tokens=MAX_TOKENS))
        for kind in kinds
    }


CODE_CUTS = (1, MAX_TOKENS, 25, MAX_CODES - 1)
"""The first one, while rows of the reply still come, in their pads, before the last one."""


def codes_until(codes: Sequence[int], count: int) -> KnownOutput:
    return known_codes(codes[:count], "length" if count == len(codes) else None)


def assert_codes(again: Chunks, codes: Sequence[int], count: int) -> None:
    made = StageChunk.joined(again)
    assert again[0].made.start == 0 and codes_of(again[0]) == list(codes[:count])
    assert all(after.made.start == before.made.stop for before, after in pairwise(again) if after.codes is not None)
    assert (codes_of(made), made.finish_reason) == (list(codes), "length")


@pytest.mark.parametrize("kind", [pytest.param("text", marks=pytest.mark.full), LONG])
async def test_codes_go_on(talker: Stage, fed: dict[str, Chunks], speak: Speak, kind: str) -> None:
    codes = speak(kind).codes
    for count in CODE_CUTS:
        again = begun_again(
            request(f"codes-{kind}-{count}", kind), f"c-{kind}-{count}", talker=codes_until(codes, count)
        )
        assert_codes(await said(talker, again, at_once(fed[kind])), codes, count)
    await until_free(talker)


@pytest.mark.parametrize("name", SOME_SAMPLINGS)
async def test_drawn_and_penalised_codes_go_on(talker: Stage, fed: dict[str, Chunks], name: str) -> None:
    asked = request(f"drawn-{name}", sampling={"talker": SAMPLINGS[name]})
    codes = codes_of(StageChunk.joined(await said(talker, asked, at_once(fed["text"]))))
    for count in CODE_CUTS:
        again = begun_again(asked, f"drawn-{name}-{count}", talker=codes_until(codes, count))
        assert_codes(await said(talker, again, at_once(fed["text"])), codes, count)
    await until_free(talker)


async def test_the_least_codes_count_from_the_first(
    talker: Stage, fed: dict[str, Chunks], reference: Reference
) -> None:
    end = SpecialIds.from_config(reference.model.config.to_dict()).codec_stops[0]
    asked = request("least", sampling={"talker": {"min_tokens": 11, "logit_bias": {end: 1e4}}})
    codes = codes_of(StageChunk.joined(await said(talker, asked, at_once(fed["text"]))))
    for count in (1, 10, 11):
        again = begun_again(asked, f"least-{count}", talker=known_codes(codes[:count]))
        made = StageChunk.joined(await said(talker, again, at_once(fed["text"])))
        assert (codes_of(made), made.finish_reason) == (codes, "stop")


async def test_known_codes_are_told_before_anything_comes_of_the_thinker(
    talker: Stage, fed: dict[str, Chunks], speak: Speak
) -> None:
    codes, feed = speak(LONG).codes, Feed()
    chunks = talker.generate(begun_again(request("early", LONG), "early", talker=codes_until(codes, 30)), feed.read())
    again = [await anext(chunks)]
    for chunk in fed[LONG]:
        feed.give(chunk)
        await talker.counts()  # a round trip, in which the engine gets on
    feed.end()
    again += [chunk async for chunk in chunks]
    assert_codes(again, codes, 30)
    await until_free(talker)


async def test_rows_of_known_codes_may_come_one_at_a_time_beside_others_and_under_preemption(
    talker: Stage, fed: dict[str, Chunks], speak: Speak
) -> None:
    before = (await talker.counts())["preemptions"]
    begun = [(kind, count) for kind in fed for count in CODE_CUTS]
    feeds = [Feed() for _ in begun]
    made = [
        asyncio.create_task(
            said(
                talker,
                begun_again(request("", kind), f"drip-{kind}-{count}", talker=codes_until(speak(kind).codes, count)),
                feed.read(),
            )
        )
        for (kind, count), feed in zip(begun, feeds, strict=True)
    ]
    for number in range(MAX_TOKENS + 1):
        for (kind, _), feed in zip(begun, feeds, strict=True):
            feed.give(fed[kind][number])
        await talker.counts()
    for feed in feeds:
        feed.end()
    for again, (kind, count) in zip(await asyncio.gather(*made), begun, strict=True):
        assert_codes(again, speak(kind).codes, count)
    assert (await talker.counts())["preemptions"] > before
    await until_free(talker)


async def test_codes_that_had_ended_need_neither_engine_nor_thinker(talker: Stage, speak: Speak) -> None:
    codes = speak("text").codes
    before = (await talker.counts())["steps"]
    again = begun_again(request("ended"), "ended", talker=codes_until(codes, len(codes)))
    assert_codes(await said(talker, again, None), codes, len(codes))
    assert (await talker.counts())["steps"] == before


async def test_a_stream_goes_on_in_its_interval(talker: Stage, fed: dict[str, Chunks], speak: Speak) -> None:
    codes = speak("text").codes
    asked = begun_again(request("paced", streams_audio=True), "paced", talker=codes_until(codes, 25))
    again = await said(talker, asked, at_once(fed["text"]))
    assert_codes(again, codes, 25)
    assert all(len(codes_of(chunk)) >= 6 for chunk in again[1:-1])


# ----------------------------------------------------------- all stages at once

SAMPLES_PER_CODE = 480
LOST_AT = (
    (1, 0, 0),
    (2, 10, 0),
    (9, 3, 0),
    (MAX_TOKENS, 30, 24),
    (MAX_TOKENS, MAX_CODES, 36),
    (MAX_TOKENS, MAX_CODES, 60),
)
"""Tokens, codes and codes' sound that were there."""


def known_at(
    tokens: Sequence[int], codes: Sequence[int], at: tuple[int, int, int], reason: str = "length"
) -> dict[str, KnownOutput]:
    of_text, of_codes, heard = at
    return {
        "thinker": KnownOutput(tuple(tokens[:of_text]), reason if of_text == len(tokens) else None),
        "talker": codes_until(codes, of_codes),
        "code2wav": KnownOutput(num_samples=heard * SAMPLES_PER_CODE),
    }


@pytest.mark.parametrize("streams", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_answers_lost_at_any_point_sound_as_the_reference(
    pipeline: AsyncOmniLLM, speak: Speak, streams: bool
) -> None:
    wanted = speak(LONG)
    asked = request("whole", LONG, streams_audio=streams)
    begun = [
        begun_again(asked, f"lost-{streams}-{number}", **known_at(wanted.token_ids, wanted.codes, at))
        for number, at in enumerate(LOST_AT)
    ]
    for made, (_, _, heard) in zip(await asyncio.gather(*map(pipeline.generate, begun)), LOST_AT, strict=True):
        assert list(made.token_ids) == wanted.token_ids and list(made.prompt_token_ids) in (wanted.prompt_ids, [])
        assert codes_of(made) == wanted.codes
        rest = wanted.waveform[heard * SAMPLES_PER_CODE :]
        if not len(rest):
            assert made.audio is None
            continue
        assert made.audio is not None and made.audio.start == heard * SAMPLES_PER_CODE
        assert made.audio.samples.shape == rest.shape
        assert snr_db(made.audio.samples, rest) >= STREAMING_SNR_DB
        if not streams:
            np.testing.assert_allclose(made.audio.samples, rest, atol=1e-4, rtol=0)


async def test_a_text_that_is_read_aloud_goes_on(pipeline: AsyncOmniLLM) -> None:
    asked = OmniRequest("read", prompt_text("text"), reply="Hello there, my friend.")
    whole = await pipeline.generate(asked)
    assert whole.audio is not None
    tokens, codes = whole.token_ids, codes_of(whole)
    for count in (0, 7, MAX_CODES):
        known = known_at(tokens, codes, (len(tokens), count, 0), "stop")
        made = await pipeline.generate(begun_again(asked, f"read-{count}", **known))
        assert codes_of(made) == codes and made.text == ""
        assert made.audio is not None
        np.testing.assert_allclose(made.audio.samples, whole.audio.samples, atol=1e-4, rtol=0)
