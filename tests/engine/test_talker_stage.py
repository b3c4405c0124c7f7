"""The talker alone, fed by hand with the reference's rows."""

from __future__ import annotations

import asyncio
import os
import signal
from itertools import pairwise

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from omni_cluster.models.progress import StallWatch
from omni_cluster.models.qwen2_5_omni.special_ids import SpecialIds
from omni_cluster.models.stage import Stage
from omni_cluster.types.errors import PayloadError, RequestError, StageDied
from omni_cluster.types.outputs import StageChunk
from omni_cluster.types.rows import Rows
from omni_cluster.vllm_engine.stage_llm import StageLLM
from tests.codes import codes_of
from tests.engine.stages import (
    MAX_CODES,
    MAX_TOKENS,
    PATIENCE_S,
    TALKER_STEP_TOKENS,
    Feed,
    Speak,
    at_once,
    begun_at_once,
    collect,
    request,
    thinker_chunks,
    until,
    until_all,
    until_counts,
    until_free,
)
from tests.reference import KINDS, Reference, media, prompt_text

pytestmark = pytest.mark.parity
VOICES = ("Chelsie", "Ethan")

Fed = dict[str, list[StageChunk]]


@pytest.fixture(scope="module")
def talker(tight_talker: Stage) -> Stage:
    return tight_talker


@pytest.fixture(scope="module")
def fed(reference: Reference) -> Fed:
    return {
        kind: thinker_chunks(reference.thinker(prompt_text(kind), *media(kind), max_new_tokens=MAX_TOKENS))
        for kind in KINDS
    }


class Failed(Exception):
    pass


@pytest.mark.parametrize("kind", KINDS)
async def test_codes_are_the_references_through_chunked_prefill(
    talker: Stage, fed: Fed, speak: Speak, kind: str
) -> None:
    made = await collect(talker.generate(request(f"alone-{kind}", kind), at_once(fed[kind])))
    assert codes_of(made) == speak(kind).codes
    assert made.finish_reason == "length" and made.rows is None


async def test_eight_streams_survive_preemption(talker: Stage, fed: Fed, speak: Speak) -> None:
    before = (await talker.counts())["preemptions"]
    asked = [(kind, voice) for kind in KINDS for voice in VOICES]
    made = await begun_at_once(
        talker,
        [
            collect(talker.generate(request(f"crowd-{kind}-{voice}", kind, voice=voice), at_once(fed[kind])))
            for kind, voice in asked
        ],
    )
    assert (await talker.counts())["preemptions"] > before
    for (kind, voice), chunk in zip(asked, made, strict=True):
        assert codes_of(chunk) == speak(kind, voice).codes
    await until_free(talker)


async def test_rows_that_come_one_at_a_time_under_preemption_give_the_same_codes(
    talker: Stage, fed: Fed, speak: Speak
) -> None:
    before = (await talker.counts())["preemptions"]
    kinds = [*KINDS, *KINDS]
    feeds = [Feed() for _ in kinds]
    made = [
        asyncio.create_task(collect(talker.generate(request(f"drip-{i}", kind), feed.read())))
        for i, (kind, feed) in enumerate(zip(kinds, feeds, strict=True))
    ]
    for number in range(MAX_TOKENS + 1):
        for kind, feed in zip(kinds, feeds, strict=True):
            feed.give(fed[kind][number])
        await talker.counts()  # a round trip, in which the engine gets on
    for feed in feeds:
        feed.end()
    for kind, chunk in zip(kinds, await asyncio.gather(*made), strict=True):
        assert codes_of(chunk) == speak(kind).codes
    assert (await talker.counts())["preemptions"] > before
    await until_free(talker)


async def test_stream_whose_row_is_missing_is_held_while_another_finishes(
    talker: Stage, fed: Fed, speak: Speak
) -> None:
    feed = Feed(*fed["text"][:4])
    held = asyncio.create_task(collect(talker.generate(request("held"), feed.read())))
    await until_counts(talker, held=1)
    other = await collect(talker.generate(request("free", "audio"), at_once(fed["audio"])))
    assert codes_of(other) == speak("audio").codes
    assert not held.done()
    for number in range(4, MAX_TOKENS):
        feed.give(fed["text"][number])
        await until_counts(talker, held=1, running=1)
    feed.give(fed["text"][-1])
    feed.end()
    assert codes_of(await held) == speak("text").codes
    await until_free(talker)


async def test_held_stream_has_made_a_code_for_each_row_that_came(talker: Stage, fed: Fed, speak: Speak) -> None:
    feed = Feed(*fed["text"][:2])
    chunks = talker.generate(request("counted"), feed.read())
    codes = codes_of(await anext(chunks))
    for number in range(2, 8):
        await until_counts(talker, held=1)
        feed.give(fed["text"][number])
        codes += codes_of(await anext(chunks))
        assert codes == speak("text").codes[:number]
    await chunks.aclose()
    await until_free(talker)


async def test_chunks_of_several_rows_and_chunks_that_come_twice_change_nothing(
    talker: Stage, fed: Fed, speak: Speak
) -> None:
    chunks = fed["audio"]
    joined = [StageChunk.joined(chunks[:5]), *chunks[2:9], StageChunk.joined(chunks[7:])]
    made = await collect(talker.generate(request("joined", "audio"), at_once(joined)))
    assert codes_of(made) == speak("audio").codes


async def test_whole_reply_in_one_chunk_gives_the_same_codes(talker: Stage, fed: Fed, speak: Speak) -> None:
    made = await collect(talker.generate(request("whole", "image"), at_once([StageChunk.joined(fed["image"])])))
    assert codes_of(made) == speak("image").codes


async def test_upstream_that_breaks_midway_ends_the_request_with_its_error(talker: Stage, fed: Fed) -> None:
    feed = Feed(*fed["text"][:4])
    made = asyncio.create_task(collect(talker.generate(request("broken"), feed.read())))
    await until_counts(talker, held=1)
    feed.fail(Failed("the thinker died"))
    with pytest.raises(Failed, match="the thinker died"):
        await asyncio.wait_for(made, PATIENCE_S)
    await until_free(talker)


async def test_upstream_that_breaks_before_the_first_row_ends_the_request_with_its_error(talker: Stage) -> None:
    feed = Feed()
    feed.fail(Failed("never started"))
    with pytest.raises(Failed, match="never started"):
        await collect(talker.generate(request("stillborn"), feed.read()))
    await until_free(talker)


async def test_broken_upstream_of_one_request_leaves_the_others(talker: Stage, fed: Fed, speak: Speak) -> None:
    broken, sound = Feed(*fed["text"][:4]), Feed(*fed["audio"][:4])
    breaking = asyncio.create_task(collect(talker.generate(request("b"), broken.read())))
    staying = asyncio.create_task(collect(talker.generate(request("s", "audio"), sound.read())))
    await until_counts(talker, held=2)
    broken.fail(Failed("gone"))
    with pytest.raises(Failed):
        await asyncio.wait_for(breaking, PATIENCE_S)
    sound.give(*fed["audio"][4:])
    sound.end()
    assert codes_of(await staying) == speak("audio").codes
    await until_free(talker)


async def test_rows_that_do_not_fit_end_their_own_request_and_no_other(talker: Stage, fed: Fed, speak: Speak) -> None:
    bad, sound = Feed(*fed["text"][:4]), Feed(*fed["audio"][:4])
    ending = asyncio.create_task(collect(talker.generate(request("misfit"), bad.read())))
    staying = asyncio.create_task(collect(talker.generate(request("fits", "audio"), sound.read())))
    await until_counts(talker, held=2)
    rows = fed["text"][3].rows
    assert rows is not None
    bad.give(StageChunk(4, (7,), rows=Rows.of(rows.kind, rows.end, torch.zeros(1, 3))), *fed["text"][5:])
    sound.give(*fed["audio"][4:])
    for feed in (bad, sound):
        feed.end()
    with pytest.raises(PayloadError, match=r"Hidden states have shape \[1, 3\], but those before them are \[n, \d+\]"):
        await asyncio.wait_for(ending, PATIENCE_S)
    assert codes_of(await staying) == speak("audio").codes
    await talker.check_health()
    await until_free(talker)


async def test_a_prompt_of_more_elements_than_a_payload_may_have_never_reaches_the_engine(
    talker: Stage, fed: Fed, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(talker, StageLLM)
    limits = talker._pipeline.limits.model_copy(update={"max_payload_elements": 1000})
    monkeypatch.setattr(talker, "_pipeline", talker._pipeline.model_copy(update={"limits": limits}))
    before = (await talker.counts())["steps"]
    with pytest.raises(PayloadError, match="but at most 1000 are taken"):
        await collect(talker.generate(request("large"), at_once(fed["text"])))
    assert (await talker.counts())["steps"] == before
    await until_free(talker)


async def test_closing_midway_frees_everything(talker: Stage, fed: Fed) -> None:
    chunks = talker.generate(request("left"), Feed(*fed["text"][:4]).read())
    await anext(chunks)
    await chunks.aclose()
    await until_free(talker)


async def test_cancelled_caller_frees_a_held_stream(talker: Stage, fed: Fed) -> None:
    made = asyncio.create_task(collect(talker.generate(request("gone"), Feed(*fed["text"][:4]).read())))
    await until_counts(talker, held=1)
    made.cancel()
    await asyncio.gather(made, return_exceptions=True)
    await until_free(talker)


async def test_cancelled_caller_leaves_the_rows_of_others(talker: Stage, fed: Fed, speak: Speak) -> None:
    """Rows of several requests share a message to the engine; who leaves must not take the others' along."""
    feeds = [Feed(*fed["text"][:2]) for _ in range(4)]
    made = [
        asyncio.create_task(collect(talker.generate(request(f"shared-{i}"), feed.read())))
        for i, feed in enumerate(feeds)
    ]
    await until_counts(talker, held=4)
    for number in range(2, MAX_TOKENS + 1):
        for feed in feeds:
            feed.give(fed["text"][number])
    for feed in feeds:
        feed.end()
    for leaving in made[:2]:
        await talker.counts()  # a round trip, in which the rows get on their way
        leaving.cancel()
    await asyncio.gather(*made[:2], return_exceptions=True)
    for chunk in await asyncio.wait_for(asyncio.gather(*made[2:]), PATIENCE_S):
        assert codes_of(chunk) == speak("text").codes
    await until_free(talker)


LONG = "audio+image"
"""Its prompt takes several steps of the tight engines."""


def in_parts(chunk: StageChunk, size: int) -> list[StageChunk]:
    """A prompt's rows as a thinker hands them on that computes `size` positions a step; the last part says the rest."""
    whole = chunk.rows
    assert whole is not None
    rests = [whole.after(at) for at in range(0, whole.end, size)]
    parts = [rest.before(rest.start + size) for rest in rests if rest is not None]
    return [*(StageChunk(rows=part) for part in parts[:-1]), replace(chunk, rows=parts[-1])]


@pytest.mark.parametrize("size", [5, TALKER_STEP_TOKENS - 1, TALKER_STEP_TOKENS, TALKER_STEP_TOKENS + 1])
async def test_a_prompt_that_comes_in_parts_gives_the_same_codes(
    talker: Stage, fed: Fed, speak: Speak, size: int
) -> None:
    chunks = [*in_parts(fed[LONG][0], size), *fed[LONG][1:]]
    made = await collect(talker.generate(request(f"parts-{size}", LONG), at_once(chunks)))
    assert codes_of(made) == speak(LONG).codes


async def test_each_chunk_of_a_prompt_is_computed_once_its_rows_have_come(
    talker: Stage, fed: Fed, speak: Speak
) -> None:
    begun, feed = (await talker.counts())["steps"], Feed()
    made = asyncio.create_task(collect(talker.generate(request("follows", LONG), feed.read())))
    first, second, *rest = in_parts(fed[LONG][0], TALKER_STEP_TOKENS)
    assert rest
    for number, part in enumerate((first, second), start=1):
        feed.give(part)
        await until_counts(talker, steps=begun + number, held=1, running=1, blocked=0)
    feed.give(*rest, *fed[LONG][1:])
    feed.end()
    assert codes_of(await made) == speak(LONG).codes
    await until_free(talker)


async def test_rows_that_come_while_a_request_waits_for_its_turn_are_kept(
    talker: Stage, fed: Fed, speak: Speak
) -> None:
    """The KV cache has room for some only; the rows of the others come before the runner knows of them."""
    feeds = [Feed() for _ in range(8)]
    made = [
        asyncio.create_task(collect(talker.generate(request(f"turn-{i}", LONG), feed.read())))
        for i, feed in enumerate(feeds)
    ]
    parts = in_parts(fed[LONG][0], TALKER_STEP_TOKENS)
    for part in parts[:-1]:
        for feed in feeds:
            feed.give(part)
        await until_all(feeds)
        await talker.counts()  # a round trip, in which the engine takes them
    assert (await talker.counts())["waiting"] > 0
    for feed in feeds:
        feed.give(parts[-1], *fed[LONG][1:])
        feed.end()
    for chunk in await asyncio.gather(*made):
        assert codes_of(chunk) == speak(LONG).codes
    await until_free(talker)


async def test_a_request_that_waits_for_its_first_rows_keeps_nobody_waiting(
    talker: Stage, fed: Fed, speak: Speak
) -> None:
    first = in_parts(fed[LONG][0], TALKER_STEP_TOKENS - 1)[0]
    feed = Feed(first)
    early = asyncio.create_task(collect(talker.generate(request("early", LONG), feed.read())))
    await until_counts(talker, blocked=1, held=1, running=0)
    other = await collect(talker.generate(request("passes"), at_once(fed["text"])))
    assert codes_of(other) == speak("text").codes
    await talker.check_health()
    early.cancel()
    await asyncio.gather(early, return_exceptions=True)
    await until_free(talker)


async def test_a_prompt_that_is_preempted_between_its_parts_gives_the_same_codes(
    talker: Stage, fed: Fed, speak: Speak
) -> None:
    kinds = ["text"] * 3
    feeds = [Feed(*fed[kind][:4]) for kind in kinds]
    made = [
        asyncio.create_task(collect(talker.generate(request(f"before-{i}", kind), feed.read())))
        for i, (kind, feed) in enumerate(zip(kinds, feeds, strict=True))
    ]
    await until_counts(talker, held=len(kinds))
    parts, feed = in_parts(fed[LONG][0], TALKER_STEP_TOKENS), Feed()
    last = asyncio.create_task(collect(talker.generate(request("preempted", LONG), feed.read())))
    feed.give(*parts[:2])
    await until_counts(talker, held=len(kinds) + 1, running=len(kinds) + 1)
    before = (await talker.counts())["preemptions"]
    for kind, other in zip(kinds, feeds, strict=True):
        other.give(*fed[kind][4:])
        other.end()
    for kind, chunk in zip(kinds, await asyncio.gather(*made), strict=True):
        assert codes_of(chunk) == speak(kind).codes
    assert (await talker.counts())["preemptions"] > before
    feed.give(*parts[2:], *fed[LONG][1:])
    feed.end()
    assert codes_of(await last) == speak(LONG).codes
    await until_free(talker)


@pytest.mark.parametrize("leaves", [True, False], ids=["its client leaves", "its thinker dies"])
async def test_a_prompt_that_ends_between_its_parts_frees_everything(talker: Stage, fed: Fed, leaves: bool) -> None:
    feed = Feed(*in_parts(fed[LONG][0], TALKER_STEP_TOKENS)[:2])
    made = asyncio.create_task(collect(talker.generate(request("midway", LONG), feed.read())))
    await until_counts(talker, held=1, running=1)
    if leaves:
        made.cancel()
    else:
        feed.fail(Failed("the thinker died"))
    with pytest.raises(asyncio.CancelledError if leaves else Failed):
        await asyncio.wait_for(made, PATIENCE_S)
    await until_free(talker)


async def test_a_long_prompt_whose_reply_has_no_row_has_no_codes(talker: Stage, fed: Fed) -> None:
    chunks = [*in_parts(fed[LONG][0], TALKER_STEP_TOKENS), StageChunk(1, finish_reason="stop")]
    made = await collect(talker.generate(request("mute", LONG), at_once(chunks)))
    assert (made.codes, made.finish_reason) == (None, "stop")
    await until_free(talker)


@pytest.mark.parametrize("count", [0, 1])
async def test_reply_of_fewer_than_two_tokens_has_no_codes(talker: Stage, fed: Fed, count: int) -> None:
    chunks = [*fed["text"][:count], StageChunk(count, finish_reason="stop")]
    made = await collect(talker.generate(request("silent"), at_once(chunks)))
    assert (made.codes, made.finish_reason) == (None, "stop")
    await until_free(talker)


async def test_reply_of_two_tokens_speaks(talker: Stage, fed: Fed, reference: Reference) -> None:
    chunks = [*fed["text"][:2], StageChunk(2, finish_reason="length")]
    made = await collect(talker.generate(request("brief"), at_once(chunks)))
    wanted = reference.speech(prompt_text("text"), max_new_tokens=2)
    assert codes_of(made) == wanted.codes


async def test_unknown_sampling_parameter_is_refused(talker: Stage, fed: Fed) -> None:
    with pytest.raises(RequestError, match="'top_q' of stage talker"):
        await collect(talker.generate(request("r", sampling={"talker": {"top_q": 1}}), at_once(fed["text"])))
    await until_free(talker)


async def test_client_cannot_change_what_ends_speech(talker: Stage, fed: Fed, speak: Speak) -> None:
    codes = speak("text").codes
    asked = request("stops", sampling={"talker": {"stop_token_ids": [codes[5]]}})
    assert codes_of(await collect(talker.generate(asked, at_once(fed["text"])))) == codes


async def test_a_least_number_of_codes_forbids_no_code_that_is_not_a_stop(
    talker: Stage, fed: Fed, speak: Speak, reference: Reference
) -> None:
    # vLLM keeps stops away for so long; the text's end token is the id of a code here.
    ends = reference.model.generation_config.eos_token_id
    for kind in KINDS:
        asked = request(f"least-{kind}", kind, sampling={"talker": {"min_tokens": 60, "logit_bias": {ends: 100.0}}})
        spoken = await collect(talker.generate(asked, at_once(fed[kind])))
        assert set(codes_of(spoken)) == {ends}


async def test_health_is_good(talker: Stage) -> None:
    await talker.check_health()


async def test_an_engine_all_of_whose_requests_wait_for_rows_is_no_stall_and_one_that_is_stopped_is(
    talker: Stage, fed: Fed, speak: Speak, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests than run at once: some wait to be admitted as long as the others wait for rows."""
    assert isinstance(talker, StageLLM)
    now_s = [0.0]
    monkeypatch.setattr(talker._probe, "_watch", StallWatch("talker", 10.0, lambda: now_s[0]))
    feeds = [Feed(*fed["text"][:2]) for _ in range(9)]
    made = [
        asyncio.create_task(collect(talker.generate(request(f"row-{i}"), feed.read()))) for i, feed in enumerate(feeds)
    ]
    seen: list[dict[str, int]] = []

    async def all_wait() -> bool:
        seen.append(await talker.counts())
        now = seen[-1]
        is_still = len(seen) > 10 and now == seen[-10]
        return is_still and now["held"] >= now["running"] > 0 and now["waiting"] > 0

    await until(all_wait)

    async def looks(count: int) -> None:
        for _ in range(count):
            now_s[0] += 2
            await talker.check_health()

    await looks(10)
    (engine,) = talker.llm.engine_core.resources.engine_manager.processes
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        with pytest.raises(StageDied, match="talker has taken no step for 12 s"):
            await looks(7)
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    for feed in feeds:
        feed.give(*fed["text"][2:])
        feed.end()
    for chunk in await asyncio.wait_for(asyncio.gather(*made), 5 * PATIENCE_S):
        assert codes_of(chunk) == speak("text").codes
    await looks(3)
    await until_free(talker)


async def test_codes_come_at_once_for_the_first_piece_of_sound_and_then_half_a_block_at_least(
    talker: Stage, fed: Fed, speak: Speak
) -> None:
    chunks = [chunk async for chunk in talker.generate(request("paced"), at_once(fed["text"]))]
    assert [code for chunk in chunks for code in codes_of(chunk)] == speak("text").codes
    # A reader that is late gets what came meanwhile as one: chunks end where the engine's steps do, or fewer of them.
    ends = [chunk.made.stop for chunk in chunks]
    assert ends[-1] == MAX_CODES and all(later - end >= 6 for end, later in pairwise(ends[:-1]) if end >= 24)


async def test_one_step_of_the_engine_makes_several_codes_and_one_where_rows_are_missing(
    talker: Stage, fed: Fed, speak: Speak
) -> None:
    before = (await talker.counts())["steps"]
    made = await collect(talker.generate(request("steps"), at_once(fed["text"])))
    assert codes_of(made) == speak("text").codes
    steps = (await talker.counts())["steps"] - before
    assert MAX_CODES / 8 <= steps < MAX_CODES / 2


async def test_steps_are_short_while_first_codes_of_a_stream_are_waited_for(
    talker: Stage, fed: Fed, speak: Speak
) -> None:
    feed = Feed(*fed["text"][:3])
    newcomer = asyncio.create_task(collect(talker.generate(request("newcomer", streams_audio=True), feed.read())))
    await until_counts(talker, held=1)
    before = (await talker.counts())["steps"]
    # In one chunk: a row that came late would cost a step of its own.
    whole = at_once([StageChunk.joined(fed["text"])])
    beside = await collect(talker.generate(request("beside", streams_audio=True), whole))
    assert MAX_CODES / 3 <= (await talker.counts())["steps"] - before < MAX_CODES / 2
    feed.give(*fed["text"][3:])
    feed.end()
    for chunk in (await newcomer, beside):
        assert codes_of(chunk) == speak("text").codes
    await until_free(talker)


async def test_least_codes_that_end_within_a_step_let_the_end_in_at_once(
    talker: Stage, fed: Fed, reference: Reference
) -> None:
    end = SpecialIds.from_config(reference.model.config.to_dict()).codec_stops[0]
    asked = request("least-11", sampling={"talker": {"min_tokens": 11, "logit_bias": {end: 1e4}}})
    made = await collect(talker.generate(asked, at_once(fed["text"])))
    assert len(codes_of(made)) == 11 and end not in codes_of(made) and made.finish_reason == "stop"


async def test_a_reply_that_was_given_sounds_as_one_that_was_made(talker: Stage, fed: Fed) -> None:
    chunks = fed["text"]
    rows = Rows.joined([chunk.rows for chunk in chunks if chunk.rows is not None])
    prompt = chunks[0].rows
    assert prompt is not None and prompt.positions is not None
    said = tuple(token for chunk in chunks for token in chunk.token_ids)[:-1]
    following = int(prompt.positions.max()) + 1 + np.arange(len(said))
    positions = np.concatenate([prompt.positions, np.tile(following, (3, 1))], axis=1)
    given = StageChunk(0, said, rows=Rows.of(rows.kind, 0, rows.tensor(), positions), finish_reason="stop")
    wanted = await collect(talker.generate(request("made"), at_once(chunks)))
    made = await collect(talker.generate(request("given", reply="not read here"), at_once([given])))
    assert made.codes == wanted.codes and len(codes_of(made)) > 1
    await until_free(talker)


async def test_an_engine_that_is_killed_ends_what_it_worked_on_and_is_not_healthy(talker: Stage, fed: Fed) -> None:
    """The last one of this module: it leaves no engine."""
    assert isinstance(talker, StageLLM)
    made = asyncio.create_task(collect(talker.generate(request("doomed"), Feed(*fed["text"][:4]).read())))
    await until_counts(talker, held=1)
    (engine,) = talker.llm.engine_core.resources.engine_manager.processes
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(StageDied, match="the engine of stage talker died"):
        await asyncio.wait_for(made, PATIENCE_S)
    with pytest.raises(StageDied, match="the engine of stage talker died"):
        await talker.check_health()
