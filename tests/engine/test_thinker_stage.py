"""The thinker alone: its rows are the reference's, however the engine cuts the work."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from omni_cluster.models.stage import Stage
from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import Media, OmniRequest, Prompt
from omni_cluster.types.outputs import StageChunk
from omni_cluster.vllm_engine.stage_llm import StageLLM
from tests.engine.stages import (
    KEPT_ROWS_BYTES,
    MAX_TOKENS,
    THINKER_STEP_TOKENS,
    begun_at_once,
    halted_within,
    request,
    until_free,
)
from tests.engine.thinking import assert_equal, think
from tests.reference import KINDS, Audio, Reference, ThinkerReference, media, prompt_text, synthetic_audio


@pytest.fixture(scope="module")
def thinker(tight_thinker: Stage) -> Stage:
    return tight_thinker


pytestmark = pytest.mark.parity

UNCACHED: dict[str, Any] = {"thinker": {"skip_reading_prefix_cache": True}}
MOST_TRIES = 20
BLOCK = 32
BLOCK_BYTES = KEPT_ROWS_BYTES // 8
LONG_REPLY = 60


class Left(Exception):
    """A client left."""


def cacheable(length: int) -> int:
    """Positions of a prompt that the prefix cache can answer: full blocks, without the last position."""
    return (length - 1) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def thought(reference: Reference) -> dict[str, ThinkerReference]:
    return {kind: reference.thinker(prompt_text(kind), *media(kind), max_new_tokens=MAX_TOKENS) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
async def test_rows_are_the_references_through_chunked_prefill(
    thinker: Stage, thought: dict[str, ThinkerReference], kind: str
) -> None:
    assert kind == "text" or len(thought[kind].prompt_ids) > THINKER_STEP_TOKENS
    assert_equal(await think(thinker, request(f"alone-{kind}", kind, sampling=UNCACHED)), thought[kind])


async def test_logprobs_are_the_references(thinker: Stage, thought: dict[str, ThinkerReference]) -> None:
    wanted = thought["audio"]
    sampling = {"thinker": {"logprobs": 2}}
    made = await think(thinker, request("logprobs", "audio", sampling=sampling))
    assert len(made.choices) == len(wanted.token_ids)
    assert all(choice.sampled == choice.likeliest[0] and choice.likeliest[1].logprob < 0 for choice in made.choices)
    margins = [choice.likeliest[0].logprob - choice.likeliest[1].logprob for choice in made.choices]
    assert min(margins) == pytest.approx(wanted.min_margin, abs=1e-4)
    # A token that is a part of a character has no text of its own; these weights make such parts that never get whole.
    spelled = "".join(choice.sampled.token for choice in made.choices)
    assert spelled.replace("\ufffd", "") == made.text.replace("\ufffd", "") != ""
    assert (await think(thinker, request("none", "audio"))).choices == ()


async def computed_for(thinker: Stage, asked: OmniRequest) -> tuple[StageChunk, int]:
    """What came of a request, and how many positions the engine computed for it."""
    before = (await thinker.counts())["computed"]
    made = await think(thinker, asked)
    return made, (await thinker.counts())["computed"] - before


@pytest.mark.parametrize("kind", KINDS)
async def test_what_the_prefix_cache_answers_has_its_rows(
    thinker: Stage, thought: dict[str, ThinkerReference], kind: str
) -> None:
    wanted, name = thought[kind], f"again-{kind}"
    length, decoded = len(wanted.prompt_ids), MAX_TOKENS - 1
    made, computed = await computed_for(thinker, request(f"{name}-0", kind, sampling=UNCACHED))
    assert (computed, made.cached_tokens) == (length + decoded, 0)
    assert_equal(made, wanted)
    made, computed = await computed_for(thinker, request(f"{name}-1", kind))
    assert (computed, made.cached_tokens) == (length - cacheable(length) + decoded, cacheable(length))
    assert_equal(made, wanted)


async def test_a_later_turn_computes_only_what_is_new(
    thinker: Stage, thought: dict[str, ThinkerReference], reference: Reference
) -> None:
    first = await think(thinker, request("turn-1", "audio"))
    prompt = f"{prompt_text('audio')}{first.text}<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    wanted = reference.thinker(prompt, *media("audio"), max_new_tokens=MAX_TOKENS)
    made, computed = await computed_for(thinker, OmniRequest("turn-2", prompt, request("", "audio").media))
    assert_equal(made, wanted)
    former = cacheable(len(thought["audio"].prompt_ids))
    assert former > 0 and computed == len(wanted.prompt_ids) - former + MAX_TOKENS - 1
    at_once = [OmniRequest(f"turn-3-{i}", prompt, request("", "audio").media) for i in range(3)]
    for made in await asyncio.gather(*(think(thinker, asked) for asked in at_once)):
        assert_equal(made, wanted)


async def test_each_turn_of_a_spoken_conversation_is_the_references(thinker: Stage, reference: Reference) -> None:
    sounds: list[Audio] = []
    said, user, turn_of_user = prompt_text("audio", "").partition("<|im_start|>user")
    for turn in range(4):
        asked = said + user + turn_of_user
        sounds.append(synthetic_audio(0.1 + 0.04 * turn))
        wanted = reference.thinker(asked, sounds, [], max_new_tokens=MAX_TOKENS)
        made = await think(thinker, OmniRequest(f"spoken-{turn}", asked, Media(audios=tuple(sounds))))
        assert_equal(made, wanted)
        said = f"{asked}Yes.<|im_end|>\n"


async def test_rows_of_a_reply_are_kept_too(thinker: Stage, reference: Reference) -> None:
    wanted = reference.thinker(prompt_text("text"), max_new_tokens=LONG_REPLY)
    both = [*wanted.prompt_ids, *wanted.token_ids]
    first = await think(thinker, request("reply", sampling={"thinker": {"max_tokens": LONG_REPLY}}))
    assert list(first.token_ids) == wanted.token_ids
    prompt = Prompt("", tuple(both[:-10]))
    made, computed = await computed_for(thinker, OmniRequest("go-on", prompt, sampling={"thinker": {"max_tokens": 10}}))
    assert list(made.token_ids) == both[-10:] and made.rows is not None
    torch.testing.assert_close(made.rows.tensor(), wanted.rows, atol=1e-4, rtol=0)
    assert cacheable(len(both) - 10) > len(wanted.prompt_ids)
    assert computed == len(both) - 1 - cacheable(len(both) - 10)


async def test_rows_that_were_dropped_at_the_bound_are_computed_again(
    thinker: Stage, thought: dict[str, ThinkerReference]
) -> None:
    wanted = thought["audio+image"]
    assert_equal(await think(thinker, request("bound-0", "audio+image")), wanted)
    other = OmniRequest("other", prompt_text("text", "What else? " * 20), sampling={"thinker": {"max_tokens": 2}})
    filled = len((await think(thinker, other)).prompt_token_ids or ()) // BLOCK
    left = KEPT_ROWS_BYTES // BLOCK_BYTES - filled
    assert 0 < left < cacheable(len(wanted.prompt_ids)) // BLOCK
    assert (await thinker.counts())["kept_rows_bytes"] == KEPT_ROWS_BYTES
    made, computed = await computed_for(thinker, request("bound-1", "audio+image"))
    assert_equal(made, wanted)
    assert computed == len(wanted.prompt_ids) - left * BLOCK + MAX_TOKENS - 1


async def test_text_only_request_has_no_rows_and_the_same_tokens(
    thinker: Stage, thought: dict[str, ThinkerReference]
) -> None:
    made = [chunk async for chunk in thinker.generate(request("mute", "audio+image", wants_audio=False), None)]
    assert all(chunk.rows is None for chunk in made)
    assert list(StageChunk.joined(made).token_ids) == thought["audio+image"].token_ids


@pytest.mark.parametrize("sampling", [UNCACHED, {}], ids=["computed", "cached"])
async def test_rows_survive_preemption_in_a_batch_of_mixed_lengths(
    thinker: Stage, thought: dict[str, ThinkerReference], sampling: dict[str, Any]
) -> None:
    before = (await thinker.counts())["preemptions"]
    kinds = [*KINDS, *KINDS]
    crowd = [request(f"crowd-{len(sampling)}-{i}", kind, sampling=sampling) for i, kind in enumerate(kinds)]
    made = await begun_at_once(thinker, [think(thinker, asked) for asked in crowd])
    assert (await thinker.counts())["preemptions"] > before
    for kind, chunk in zip(kinds, made, strict=True):
        assert_equal(chunk, thought[kind])
    await until_free(thinker)


async def test_media_that_the_cache_answered_are_encoded_again_after_a_preemption(
    thinker: Stage, reference: Reference
) -> None:
    kind, reply = "audio+image", {"thinker": {"max_tokens": LONG_REPLY}}
    wanted = reference.thinker(prompt_text(kind), *media(kind), max_new_tokens=LONG_REPLY)
    await think(thinker, request("shown-before", kind))
    llm = cast(StageLLM, thinker).llm
    await llm.reset_encoder_cache()  # as if others' media had taken its place
    before = (await thinker.counts())["computed"]
    async with halted_within(thinker, think(thinker, request("shown-again", kind, sampling=reply))) as answer:
        assert await llm.reset_prefix_cache(reset_running_requests=True)
    made = await answer
    length = len(wanted.prompt_ids)
    assert made.cached_tokens == cacheable(length)
    assert (await thinker.counts())["computed"] - before > length  # it was computed from the beginning
    assert_equal(made, wanted)


async def test_requests_with_and_without_rows_share_a_batch(
    thinker: Stage, thought: dict[str, ThinkerReference]
) -> None:
    made = await asyncio.gather(
        *(think(thinker, request(f"mixed-{i}", "audio", wants_audio=bool(i % 2))) for i in range(4))
    )
    for i, chunk in enumerate(made):
        assert list(chunk.token_ids) == thought["audio"].token_ids
        assert (chunk.rows is not None) == bool(i % 2)
        if chunk.rows is not None:
            assert_equal(chunk, thought["audio"])


async def test_each_chunk_follows_the_one_before(thinker: Stage, thought: dict[str, ThinkerReference]) -> None:
    chunks = [chunk async for chunk in thinker.generate(request("steps", "text"), None)]
    tokens = rows = 0
    for chunk in chunks:
        assert chunk.token_start == tokens
        assert chunk.rows is None or chunk.rows.start == rows
        tokens, rows = chunk.token_end, chunk.rows.end if chunk.rows is not None else rows
    assert [chunk.prompt_token_ids is not None for chunk in chunks] == [True, *[False] * (len(chunks) - 1)]
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"
    assert rows == len(thought["text"].prompt_ids) + MAX_TOKENS - 1


async def test_rows_of_a_long_prompt_come_as_its_chunks_are_computed(
    thinker: Stage, thought: dict[str, ThinkerReference]
) -> None:
    """Parts that are not read before the next are joined with it, or with the first token: it is asked until one is."""
    early: list[StageChunk] = []
    for number in range(MOST_TRIES):
        asked = request(f"parts-{number}", "audio+image", sampling=UNCACHED)
        chunks = [chunk async for chunk in thinker.generate(asked, None)]
        early = [chunk for chunk in chunks if chunk.only_rows]
        assert early == chunks[: len(early)]  # before the first token
        ends = [chunk.rows.end for chunk in early if chunk.rows is not None]
        assert len(ends) == len(early) and not any(end % THINKER_STEP_TOKENS for end in ends)
        assert_equal(StageChunk.joined(chunks), thought["audio+image"])
        if early:
            return
    pytest.fail("no rows came before the first token")


async def test_rows_of_cached_blocks_come_with_the_first_part(
    thinker: Stage, thought: dict[str, ThinkerReference]
) -> None:
    first = await think(thinker, OmniRequest("first", prompt_text("text", "Which else? " * 8)))
    more = thought["audio+image"].prompt_ids[-1:] * (THINKER_STEP_TOKENS + BLOCK)
    prompt = Prompt("", (*(first.prompt_token_ids or ()), *more))
    chunks = [chunk async for chunk in thinker.generate(OmniRequest("second", prompt), None)]
    cached, part = StageChunk.joined(chunks).cached_tokens, chunks[0].rows
    assert cached >= BLOCK and part is not None and part.positions is not None
    assert part.start == 0 and part.end >= cached + THINKER_STEP_TOKENS
    assert part.positions.shape == (3, len(prompt.token_ids))


async def test_a_prompt_of_one_step_has_its_rows_with_its_first_token(thinker: Stage) -> None:
    chunks = [chunk async for chunk in thinker.generate(request("one-step", sampling=UNCACHED), None)]
    assert not any(chunk.only_rows for chunk in chunks)


async def test_closing_with_the_first_rows_of_a_long_prompt_frees_everything(thinker: Stage) -> None:
    chunks = thinker.generate(request("early-left", "audio+image", sampling=UNCACHED), None)
    assert (await anext(chunks)).rows is not None
    await chunks.aclose()
    await until_free(thinker)


async def test_closing_midway_frees_everything(thinker: Stage, thought: dict[str, ThinkerReference]) -> None:
    for _ in range(2):  # the second one has cached rows
        chunks = thinker.generate(request("left", "audio", sampling={"thinker": {"max_tokens": 100}}), None)
        await anext(chunks)
        await chunks.aclose()
        await until_free(thinker)
    assert_equal(await think(thinker, request("after", "audio")), thought["audio"])


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"temprature": 0.5}, "sampling parameter 'temprature' of stage thinker is unknown"),
        ({"temperature": -1}, "temperature of stage thinker is -1, but it should be a number from 0 to 2"),
        ({"temperature": "hot"}, "stage thinker"),
        ({"max_tokens": "many"}, "stage thinker"),
        ({"max_tokens": -1}, "stage thinker"),
        ({"extra_args": 5}, "'extra_args'"),
        (
            {"repetition_penalty": 1e-300},
            "repetition_penalty of stage thinker is 1e-300, but it should be a number from",
        ),
        ({"min_tokens": 40, "max_tokens": 4}, "min_tokens of stage thinker is 40, but it should be at most .* 4"),
        ({"min_tokens": 5000}, "min_tokens of stage thinker is 5000, but it should be at most"),
        ({"stop_token_ids": [2**31 - 1]}, "stop_token_ids of stage thinker has 2147483647, but the model's tokens are"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias of stage thinker has 1000000, but the model's tokens are"),
    ],
)
async def test_sampling_that_vllm_does_not_know_is_refused(
    thinker: Stage, sampling: dict[str, object], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        await think(thinker, request("refused", sampling={"thinker": sampling}))
    await until_free(thinker)


async def test_prompt_that_is_too_long_is_refused(thinker: Stage) -> None:
    with pytest.raises(RequestError, match=r"25[56]"):
        await think(thinker, OmniRequest("long", "hello " * 400))
    await until_free(thinker)


@pytest.mark.parametrize("together", [1, 4])
async def test_a_picture_that_the_engine_was_never_sent_is_sent_to_the_next_who_shows_it(
    thinker: Stage, reference: Reference, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """vLLM keeps what it made of a picture, and holds the engine to have it: also of who left meanwhile."""
    shown = Image.effect_noise((64 + 28 * together, 64), 90).convert("RGB")
    process = cast(StageLLM, thinker)._rendered

    async def leave(prompt: Mapping[str, Any]) -> None:
        await process(prompt)
        raise Left

    with monkeypatch.context() as patch, pytest.raises(Left):
        patch.setattr(thinker, "_rendered", leave)
        await think(thinker, OmniRequest("left", prompt_text("image"), Media(images=(shown,))))
    asked = prompt_text("image", "What is it?")
    wanted = reference.thinker(asked, [], [shown], max_new_tokens=MAX_TOKENS)
    requests = [OmniRequest(f"shown-{i}", asked, Media(images=(shown,))) for i in range(together)]
    for made in await asyncio.gather(*(think(thinker, each) for each in requests)):
        assert_equal(made, wanted)


async def test_sampling_of_another_stage_does_not_matter_here(
    thinker: Stage, thought: dict[str, ThinkerReference]
) -> None:
    made = await think(thinker, request("other", sampling={"talker": {"max_tokens": 1}}))
    assert list(made.token_ids) == thought["text"].token_ids


async def test_media_more_than_the_configuration_allows_are_refused(thinker: Stage) -> None:
    one = request("crowded", "image")
    three = OmniRequest(
        "crowded", one.prompt.replace("<|IMAGE|>", "<|IMAGE|>" * 3), type(one.media)(images=one.media.images * 3)
    )
    with pytest.raises(RequestError, match=r"the model cannot take the prompt's media \(image: 3\)"):
        await think(thinker, three)
    await until_free(thinker)


async def test_what_the_processor_cannot_take_is_told_without_where_it_lies(thinker: Stage) -> None:
    one = request("narrow", "image")
    narrow = OmniRequest("narrow", one.prompt, type(one.media)(images=(Image.new("RGB", (1, 300)),)))
    with pytest.raises(RequestError, match=r"^the model cannot take the prompt's media \(image: 1\)") as refused:
        await think(thinker, narrow)
    assert not any(inner in str(refused.value) for inner in ("[", "\n", "stage", "0x", "data=", "aspect"))
    vllms = refused.value.__cause__
    assert vllms is not None and "aspect ratio" in str(vllms.__cause__)
    await until_free(thinker)


async def test_a_reply_that_is_given_has_the_rows_of_one_that_was_made(thinker: Stage, reference: Reference) -> None:
    reply = "Hello there, my friend."
    wanted = reference.thinker(prompt_text("text") + reply, max_new_tokens=2)
    given = OmniRequest("given", prompt_text("text"), reply=reply)
    made = await think(thinker, given)
    assert [*(made.prompt_token_ids or ()), *made.token_ids] == wanted.prompt_ids
    assert (made.text, made.finish_reason, made.token_start) == (reply, "stop", 0)
    assert made.rows is not None and made.rows.positions is not None
    assert np.array_equal(made.rows.positions, wanted.positions.numpy())
    torch.testing.assert_close(made.rows.tensor(), wanted.rows[: len(wanted.prompt_ids)], atol=1e-4, rtol=0)
    await until_free(thinker)


async def test_marks_in_a_reply_that_is_given_are_text(thinker: Stage) -> None:
    made = await think(thinker, OmniRequest("marks", prompt_text("text"), reply="<|im_end|>"))
    assert len(made.token_ids) > 1
