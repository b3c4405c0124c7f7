"""The thinker alone: its tokens and rows are the reference's, however the engine cuts the work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import KnownOutput, Media, OmniRequest
from omni_cluster.types.outputs import StageChunk
from omni_cluster.vllm_engine.stage_llm import StageLLM
from tests.engine.stages import MAX_TOKENS, THINKER_STEP_TOKENS, begun_at_once, until_free
from tests.models.qwen3_omni.thinker_engine import OfFolder, thinking
from tests.models.qwen3_omni.thinker_reference import ThinkerReference, Thought, media_of, prompt_text, request
from tests.models.qwen3_omni.thinking import assert_equal, assert_rows, think
from tests.reference import KINDS, synthetic_audio

pytestmark = pytest.mark.parity
BLOCK = 32
BLOCK_BYTES = 2 * 6 * 2 * 32 * 4 * BLOCK
"""Keys and values of six layers, of two heads each."""
TIGHT: dict[str, Any] = {
    "max_num_batched_tokens": THINKER_STEP_TOKENS,
    "max_model_len": 256,
    "block_size": BLOCK,
    "kv_cache_memory_bytes": 12 * BLOCK_BYTES,
}
UNCACHED: dict[str, Any] = {"thinker": {"skip_reading_prefix_cache": True}}
OF_MEDIA = tuple(kind for kind in KINDS if kind != "text")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinker(forked_engines: None, qwen3_folder: Path) -> AsyncIterator[StageLLM]:
    """Prompts need several steps, and eight requests do not fit into the KV cache at once."""
    async with thinking(qwen3_folder, **TIGHT) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(qwen3_folder: Path, qwen3_reference: Any) -> ThinkerReference:
    return ThinkerReference(qwen3_folder, qwen3_reference)


@pytest.fixture(scope="module")
def thought(reference: ThinkerReference) -> dict[str, Thought]:
    return {kind: reference.think(prompt_text(kind), media_of(kind), MAX_TOKENS) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_are_the_references_through_chunked_prefill(
    thinker: StageLLM, thought: dict[str, Thought], kind: str
) -> None:
    made = await think(thinker, request(f"alone-{kind}", kind, sampling=UNCACHED))
    assert kind == "text" or len(thought[kind].prompt_ids) > THINKER_STEP_TOKENS
    assert_equal(made, thought[kind])


@pytest.mark.parametrize("kind", OF_MEDIA)
async def test_rows_are_what_enters_the_accepted_layer_where_media_are(
    thinker: StageLLM, thought: dict[str, Thought], kind: str
) -> None:
    made = await think(thinker, request(f"rows-{kind}", kind, sampling=UNCACHED))
    assert_equal(made, thought[kind])
    assert_rows(made, thought[kind])
    again = await think(thinker, request(f"cached-{kind}", kind))
    assert again.cached_tokens >= BLOCK
    assert_equal(again, thought[kind])
    assert_rows(again, thought[kind])


async def test_a_request_without_media_has_no_rows_and_is_cached_for_the_next(
    thinker: StageLLM, reference: ThinkerReference
) -> None:
    text = prompt_text("text", "What else is there? " * 4)
    wanted = reference.think(text, media_of("text"), MAX_TOKENS)
    for turn, cached in enumerate((0, (len(wanted.prompt_ids) - 1) // BLOCK * BLOCK)):
        chunks = [chunk async for chunk in thinker.generate(OmniRequest(f"text-{turn}", text), None)]
        assert all(chunk.rows is None for chunk in chunks)
        made = StageChunk.joined(chunks)
        assert_equal(made, wanted)
        assert made.cached_tokens == cached
    assert cached >= BLOCK


async def test_a_later_turn_computes_only_what_is_new(thinker: StageLLM, reference: ThinkerReference) -> None:
    first = await think(thinker, request("turn-1", "audio"))
    shown = prompt_text("image", "And this?").partition("<|im_start|>user")
    text = f"{prompt_text('audio')}{first.text}<|im_end|>\n{shown[1]}{shown[2]}"
    given = Media(media_of("audio").audios, media_of("image").images)
    wanted = reference.think(text, given, MAX_TOKENS)
    made = await think(thinker, OmniRequest("turn-2", text, given))
    assert_equal(made, wanted)
    assert_rows(made, wanted)
    assert made.cached_tokens >= len(first.prompt_token_ids or ()) // BLOCK * BLOCK > 0


async def test_a_step_that_only_decodes_brings_no_rows(thinker: StageLLM) -> None:
    chunks = [chunk async for chunk in thinker.generate(request("decoded", "audio+image"), None)]
    assert any(chunk.rows is not None for chunk in chunks)
    assert not any(chunk.rows is not None for chunk in chunks if chunk.token_start)


@pytest.mark.parametrize("sampling", [UNCACHED, {}], ids=["computed", "cached"])
async def test_tokens_and_rows_survive_preemption_in_a_batch_of_mixed_lengths(
    thinker: StageLLM, thought: dict[str, Thought], sampling: dict[str, Any]
) -> None:
    before = (await thinker.counts())["preemptions"]
    kinds = [*KINDS, *KINDS]
    crowd = [request(f"crowd-{len(sampling)}-{i}", kind, sampling=sampling) for i, kind in enumerate(kinds)]
    made = await begun_at_once(thinker, [think(thinker, asked) for asked in crowd])
    assert (await thinker.counts())["preemptions"] > before
    for kind, chunk in zip(kinds, made, strict=True):
        assert_equal(chunk, thought[kind])
        if kind == "text":
            assert chunk.rows is None
        else:
            assert_rows(chunk, thought[kind])
    await until_free(thinker)


async def test_requests_with_and_without_rows_share_a_batch(thinker: StageLLM, thought: dict[str, Thought]) -> None:
    asked = [request(f"mixed-{i}", "audio", wants_audio=bool(i % 2)) for i in range(4)]
    for i, made in enumerate(await asyncio.gather(*(think(thinker, each) for each in asked))):
        assert_equal(made, thought["audio"])
        assert (made.rows is not None) == bool(i % 2)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_that_is_begun_again_goes_on_as_it_was(
    thinker: StageLLM, thought: dict[str, Thought], kind: str
) -> None:
    wanted = thought[kind]
    for cut in (1, MAX_TOKENS - 1):
        known = {"thinker": KnownOutput(tuple(wanted.token_ids[:cut]))}
        made = await think(thinker, request(f"again-{kind}-{cut}", kind, known=known))
        assert_equal(made, wanted)
        if kind != "text":
            assert_rows(made, wanted)


@pytest.mark.parametrize("kind", ["text", "audio"])
async def test_an_answer_that_is_all_there_is_computed_for_rows_alone(
    thinker: StageLLM, thought: dict[str, Thought], kind: str
) -> None:
    wanted, before = thought[kind], (await thinker.counts())["steps"]
    known = {"thinker": KnownOutput(tuple(wanted.token_ids), finish_reason="length")}
    made = await think(thinker, request(f"ended-{kind}", kind, known=known))
    assert_equal(made, wanted)
    assert made.finish_reason == "length" and (made.rows is not None) == (kind == "audio")
    if kind == "audio":
        assert_rows(made, wanted)
    assert ((await thinker.counts())["steps"] > before) == (kind == "audio")


async def test_a_sound_is_the_same_beside_a_longer_one(thinker: StageLLM, reference: ThinkerReference) -> None:
    """The audio tower fills the last second of each up to the longest of all that it is given."""
    text = prompt_text("audio+audio", "Hi")
    given = Media((synthetic_audio(0.3), synthetic_audio(1.0)))
    wanted = reference.think(text, given, MAX_TOKENS)
    made = await think(thinker, OmniRequest("together", text, given))
    assert_equal(made, wanted)
    assert_rows(made, wanted)


async def test_a_reply_that_is_given_is_said_as_it_is_and_not_computed(
    thinker: StageLLM, thought: dict[str, Thought], qwen3_folder: Path
) -> None:
    reply, before = "Hello there, my friend.", await thinker.counts()
    made = await think(thinker, OmniRequest("given", prompt_text("text"), reply=reply))
    assert (made.text, made.finish_reason, made.rows) == (reply, "stop", None)
    assert list(made.prompt_token_ids or ()) == thought["text"].prompt_ids
    assert list(made.token_ids) == OfFolder(qwen3_folder).tokenize(reply, False)
    assert await thinker.counts() == before


async def test_a_given_reply_that_is_too_long_is_refused_though_it_is_not_computed(thinker: StageLLM) -> None:
    asked = OmniRequest("long", prompt_text("text"), reply="Hello there, my friend. " * 50)
    with pytest.raises(RequestError, match=r"length is 255 tokens, but the prompt has \d+ tokens"):
        await think(thinker, asked)


@pytest.mark.parametrize(("kind", "most"), [("audio", 6), ("image", 2)])
async def test_media_more_than_the_configuration_allows_are_refused(thinker: StageLLM, kind: str, most: int) -> None:
    one, number = media_of(kind), most + 1
    many = type(one)(one.audios * number, one.images * number)
    asked = OmniRequest("crowded", prompt_text("+".join([kind] * number)), many)
    with pytest.raises(RequestError, match=rf"the model cannot take the prompt's media \({kind}: {number}\)"):
        await think(thinker, asked)
    await until_free(thinker)


async def test_closing_with_the_first_rows_of_a_long_prompt_frees_everything(thinker: StageLLM) -> None:
    chunks = thinker.generate(request("left", "audio+image", sampling=UNCACHED), None)
    await anext(chunks)
    await chunks.aclose()
    await until_free(thinker)
