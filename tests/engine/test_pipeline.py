"""All stages together in one process: the answers are the reference's, and stages overlap."""

from __future__ import annotations

import asyncio
import itertools
from typing import cast

import numpy as np
import pytest

from omni_cluster.engine.omni_llm import AsyncOmniLLM
from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import OmniRequestOutput
from omni_cluster.types.rows import PrefixHashes
from omni_cluster.vllm_engine.held_prefixes import PrefixHold
from omni_cluster.vllm_engine.kept_rows import LEAST_LEFT_OUT
from omni_cluster.vllm_engine.stage_llm import StageLLM
from tests.codes import codes_of
from tests.engine.stages import MAX_TOKENS, PATIENCE_S, Speak, halted_within, request, until
from tests.reference import KINDS, Reference, SpeechReference, prompt_text

pytestmark = pytest.mark.parity
VOICES = ("Chelsie", "Ethan")
MOST_OF_A_BLOCK = 128
"""Positions of a block of vLLM's KV cache where the configuration does not say it: 128 on a CPU, 16 on a card."""


def assert_equal(made: OmniRequestOutput, wanted: SpeechReference) -> None:
    assert list(made.prompt_token_ids) == wanted.prompt_ids
    assert list(made.token_ids) == wanted.token_ids
    assert codes_of(made) == wanted.codes
    assert made.audio is not None and (made.audio.start, made.audio.sample_rate_hz) == (0, 24_000)
    np.testing.assert_allclose(made.audio.samples, wanted.waveform, atol=1e-4, rtol=0)


async def until_empty(pipeline: AsyncOmniLLM) -> None:
    async def empty() -> bool:
        counts = await pipeline.counts()
        kept = ("running", "waiting", "held", "kv_blocks_used", "row_counts", "held_blocks")
        return not any(stage.get(name) for stage in counts.values() for name in kept)

    await until(empty)


@pytest.mark.parametrize("kind", KINDS)
async def test_answer_alone_is_the_references(pipeline: AsyncOmniLLM, speak: Speak, kind: str) -> None:
    made = await pipeline.generate(request(f"alone-{kind}", kind))
    assert_equal(made, speak(kind))
    assert made.finish_reason == "length" and made.request_id == f"alone-{kind}"


async def test_answers_in_one_batch_are_the_references_in_each_voice(pipeline: AsyncOmniLLM, speak: Speak) -> None:
    asked = [(kind, *each) for kind, each in zip(KINDS, itertools.cycle((("Chelsie", 0), ("Ethan", 1))))]
    made = await asyncio.gather(*(pipeline.generate(request(f"{k}-{v}", k, voice=v, seed=s)) for k, v, s in asked))
    for output, (kind, voice, seed) in zip(made, asked, strict=True):
        assert_equal(output, speak(kind, voice, seed))
    await until_empty(pipeline)


async def test_repeated_request_is_answered_the_same(pipeline: AsyncOmniLLM, speak: Speak) -> None:
    first, second = [await pipeline.generate(request(f"again-{i}", "audio+image")) for i in range(2)]
    assert (first.token_ids, first.codes) == (second.token_ids, second.codes)
    assert first.audio is not None and second.audio is not None
    np.testing.assert_array_equal(first.audio.samples, second.audio.samples)
    assert_equal(second, speak("audio+image"))


async def test_a_later_turn_computes_only_what_is_new_and_sounds_as_the_reference(
    pipeline: AsyncOmniLLM, reference: Reference
) -> None:
    first = prompt_text("text", "Hello world, describe it. " * 12)
    said = await pipeline.generate(OmniRequest("turn-1", first))
    later = f"{first}{said.text}<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    wanted, computed = reference.speech(later), []
    for turn, sampling in enumerate([{}, {"skip_reading_prefix_cache": True}]):
        before = (await pipeline.counts())["thinker"]["computed"]
        made = await pipeline.generate(OmniRequest(f"turn-2-{turn}", later, sampling={"thinker": sampling}))
        computed.append((await pipeline.counts())["thinker"]["computed"] - before)
        assert_equal(made, wanted)
    least = (len(said.prompt_token_ids) - 1) // MOST_OF_A_BLOCK * MOST_OF_A_BLOCK
    assert computed[1] == len(wanted.prompt_ids) + MAX_TOKENS - 1
    assert 0 < least <= computed[1] - computed[0] < len(wanted.prompt_ids)


async def test_earlier_turns_are_computed_once_in_both_stages_and_their_rows_sent_once(
    pipeline: AsyncOmniLLM, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the talker has of an earlier prompt needs no rows; those of the reply to it come with the next one."""
    held: list[int] = []

    async def positions(self: PrefixHold, prefix: PrefixHashes) -> int:
        held.append(await ask(self, prefix))
        return held[-1]

    ask = PrefixHold.positions
    monkeypatch.setattr(PrefixHold, "positions", positions)
    block = cast(StageLLM, pipeline._stages["talker"]).llm.vllm_config.cache_config.block_size
    prompt, known = prompt_text("text", "This is what nobody else begins with. " * 25), 0
    for turn in range(3):
        before = (await pipeline.counts())["talker"]["computed"]
        made = await pipeline.generate(OmniRequest(f"long-turn-{turn}", prompt, voice=VOICES[turn % 2]))
        computed = (await pipeline.counts())["talker"]["computed"] - before
        assert_equal(made, reference.speech(prompt, voice=VOICES[turn % 2]))
        length = len(made.prompt_token_ids)
        assert 0 <= computed - (length + 2 - known) < made.codec_tokens
        known = length // block * block
        assert known >= LEAST_LEFT_OUT
        prompt = f"{prompt}{made.text}<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    assert len(held) == 2 and all(LEAST_LEFT_OUT <= each <= known for each in held)
    await until_empty(pipeline)


async def test_same_prompt_in_two_voices_at_once_says_the_same_text(pipeline: AsyncOmniLLM, speak: Speak) -> None:
    chelsie, ethan = await asyncio.gather(*(pipeline.generate(request(f"voice-{v}", "text", voice=v)) for v in VOICES))
    assert_equal(chelsie, speak("text", "Chelsie"))
    assert_equal(ethan, speak("text", "Ethan"))
    assert chelsie.text == ethan.text


async def test_text_only_request_runs_the_thinker_alone(pipeline: AsyncOmniLLM, speak: Speak) -> None:
    events = [event async for event in pipeline.stream(request("mute", "audio", wants_audio=False))]
    assert {event.stage for event in events} == {"thinker"}
    assert [t for event in events for t in event.chunk.token_ids] == speak("audio").token_ids


async def test_reply_of_one_token_has_text_and_no_sound(pipeline: AsyncOmniLLM, speak: Speak) -> None:
    made = await pipeline.generate(request("brief", sampling={"thinker": {"max_tokens": 1}}))
    assert list(made.token_ids) == speak("text").token_ids[:1]
    assert made.audio is None and made.codes is None


async def test_text_is_that_of_the_tokens(pipeline: AsyncOmniLLM, speak: Speak, reference: object) -> None:
    made = await pipeline.generate(request("words", "image", wants_audio=False))
    tokenizer = reference.processor.tokenizer  # type: ignore[attr-defined]
    assert made.text == tokenizer.decode(speak("image").token_ids, skip_special_tokens=True)


async def test_talker_speaks_before_the_thinker_is_done(pipeline: AsyncOmniLLM, speak: Speak) -> None:
    """The thinker is halted within its reply until then: on a busy machine it might be done before it is heard."""
    long, stages = {"thinker": {"max_tokens": 400, "ignore_eos": True}}, list[str]()

    async def listens() -> None:
        async for event in pipeline.stream(request("long", sampling=long)):
            stages.append(event.stage)

    async def talker_speaks() -> bool:
        return "talker" in stages

    some = len(speak("text").prompt_ids) + 4
    async with halted_within(pipeline._stages["thinker"], listens(), some) as listening:
        await until(talker_speaks)
    await listening
    last_of_thinker = len(stages) - 1 - stages[::-1].index("thinker")
    assert stages.index("talker") < last_of_thinker


async def test_last_chunk_of_each_stage_says_why_it_ended(pipeline: AsyncOmniLLM) -> None:
    reasons: dict[str, list[str | None]] = {}
    async for event in pipeline.stream(request("ends")):
        reasons.setdefault(event.stage, []).append(event.chunk.finish_reason)
    assert {stage: said[-1] for stage, said in reasons.items()} == {
        "thinker": "length", "talker": "length", "code2wav": "stop",
    }  # fmt: skip
    assert all(reason is None for said in reasons.values() for reason in said[:-1])


async def test_events_carry_no_rows(pipeline: AsyncOmniLLM) -> None:
    assert all([event.chunk.rows is None async for event in pipeline.stream(request("light"))])


@pytest.mark.parametrize("stage", ["thinker", "talker"])
async def test_closing_the_stream_frees_every_stage(pipeline: AsyncOmniLLM, stage: str) -> None:
    events = pipeline.stream(request(f"left-{stage}", sampling={"thinker": {"max_tokens": 400, "ignore_eos": True}}))
    async for event in events:
        if event.stage == stage:
            break
    await events.aclose()  # type: ignore[attr-defined]
    await until_empty(pipeline)


async def test_cancelled_requests_change_nothing_for_the_others(pipeline: AsyncOmniLLM, speak: Speak) -> None:
    tasks = [asyncio.create_task(pipeline.generate(request(f"crowd-{i}", "image"))) for i in range(6)]
    left = pipeline.stream(request("signal", "text"))
    async for event in left:
        if event.stage == "talker":
            break
    for task in tasks[:3]:
        task.cancel()
    await left.aclose()  # type: ignore[attr-defined]
    await asyncio.gather(*tasks[:3], return_exceptions=True)
    for made in await asyncio.wait_for(asyncio.gather(*tasks[3:]), PATIENCE_S):
        assert_equal(made, speak("image"))
    await until_empty(pipeline)


@pytest.mark.parametrize("stage", ["thinker", "talker"])
@pytest.mark.parametrize("sampling", [{"temprature": 1}, {"temperature": -1}])
async def test_bad_sampling_is_refused_and_leaves_nothing_behind(
    pipeline: AsyncOmniLLM, stage: str, sampling: dict[str, object]
) -> None:
    with pytest.raises(RequestError, match=f"of stage {stage}"):
        await pipeline.generate(request("refused", sampling={stage: sampling}))
    await until_empty(pipeline)


@pytest.mark.parametrize("sampling", [{"talker": {"temprature": 1}}, {"talker": {"temperature": -1}}, {"painter": {}}])
async def test_bad_sampling_is_refused_before_any_stage_runs(
    pipeline: AsyncOmniLLM, sampling: dict[str, dict[str, object]]
) -> None:
    events = pipeline.stream(request("early", sampling=sampling))
    with pytest.raises(RequestError):
        await anext(events)
    await until_empty(pipeline)


async def test_prompt_that_is_too_long_is_refused(pipeline: AsyncOmniLLM) -> None:
    with pytest.raises(RequestError, match=r"102[34]"):
        await pipeline.generate(OmniRequest("huge", "hello " * 2000))
    await until_empty(pipeline)


async def test_unknown_voice_is_refused(pipeline: AsyncOmniLLM) -> None:
    with pytest.raises(RequestError, match="voice is 'Nobody'; use one of Chelsie, Ethan"):
        await pipeline.generate(request("stranger", voice="Nobody"))


async def test_thinkers_reply_ends_at_the_clients_limit(pipeline: AsyncOmniLLM, speak: Speak) -> None:
    made = await pipeline.generate(request("limit", wants_audio=False, sampling={"thinker": {"max_tokens": 5}}))
    assert list(made.token_ids) == speak("text").token_ids[:5] and len(made.token_ids) < MAX_TOKENS


async def test_talkers_codes_end_at_the_clients_limit(pipeline: AsyncOmniLLM, speak: Speak) -> None:
    made = await pipeline.generate(request("short", sampling={"talker": {"max_tokens": 7}}))
    assert codes_of(made) == speak("text").codes[:7]
    assert made.audio is not None and len(made.audio.samples) == 7 * 480


async def test_log_that_is_too_small_fails_the_request_and_frees_it(pipeline: AsyncOmniLLM) -> None:
    from omni_cluster.engine.output_log import OutputLogFull

    config = pipeline.config
    small = config.model_copy(update={"limits": config.limits.model_copy(update={"outbox_max_bytes": 1000})})
    tight = AsyncOmniLLM(small)
    tight._stages = pipeline._stages  # the same engines behind a smaller limit, which is the request's and not theirs
    with pytest.raises(OutputLogFull, match="outbox_max_bytes = 1000"):
        await asyncio.wait_for(tight.generate(request("full")), PATIENCE_S)
    await until_empty(pipeline)
