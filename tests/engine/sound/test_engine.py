"""A running code2wav stage: pieces of streams, whole answers beside them, and what an ended stream leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine.build import bind, make_stage
from omni_cluster.engine.omni_llm import AsyncOmniLLM
from omni_cluster.engine.playback import Playback
from omni_cluster.engine.sound.engine import SoundEngine, is_device_error
from omni_cluster.engine.sound.playout import PlayoutDelay
from omni_cluster.models.progress import StallWatch
from omni_cluster.models.qwen2_5_omni.code2wav import REPLAYED_BLOCKS
from omni_cluster.models.qwen2_5_omni.flow import EVALUATIONS
from omni_cluster.models.sound import SoundJob, StepTime
from omni_cluster.types.errors import ConfigError, JobFailed, PayloadError, SoundEngineStopped, StageDied, TokenError
from omni_cluster.types.inputs import KnownOutput, OmniRequest
from omni_cluster.types.outputs import AudioChunk, OmniRequestOutput, StageChunk
from omni_cluster.vllm_engine.worker import sound_worker
from tests.codes import codes_chunk
from tests.engine.stages import (
    PATIENCE_S,
    Feed,
    at_once,
    request,
    running,
    talker_stage,
    thinker_stage,
    until,
    until_counts,
)
from tests.models.qwen2_5_omni.likeness import STREAMING_SNR_DB, snr_db

SAMPLES_PER_CODE = 480
BLOCK = 12
MAX_STREAMS = 3
MAX_PIECE_BLOCKS = 4
SOUND_TOLERANCE = 1e-5
SEAM_SAMPLES = 24_000
EDGE_TOLERANCE = 2e-3
"""Between two ways of cutting one stream into pieces: at an edge the vocoder sees an estimate of what follows. Another
seed or voice is ten times as far away."""


def config() -> PipelineConfig:
    options = {"max_streams": MAX_STREAMS, "max_piece_blocks": MAX_PIECE_BLOCKS, "max_wait_ms": 1}
    code2wav = StageConfig(
        stage_id=2,
        model_stage="code2wav",
        engine_input_source=[1],
        num_gpus=0,
        final_output_type="audio",
        options=options,
    )
    return PipelineConfig(
        model="preset:tiny", family="qwen2_5_omni", stages=[thinker_stage(), talker_stage(), code2wav]
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine() -> AsyncIterator[SoundEngine]:
    async with running(config(), "code2wav") as stage:
        assert isinstance(stage, SoundEngine)
        yield stage


class Watch:
    """The stage's own model, seen at work: what it was told, and steps that wait while `held`."""

    METHODS = ("begin", "step", "finish", "drop", "forget")

    def __init__(self, model: Any) -> None:
        self._model = {name: getattr(model, name) for name in self.METHODS}
        self._open = threading.Event()
        self._open.set()
        self._streams: dict[int, str | None] = {}
        self.begun: list[SoundJob] = []
        self.said: list[str] = []

    def begin(self, number: int, job: SoundJob) -> None:
        self._streams[number] = job.stream
        self.begun.append(job)
        self.said.append(f"begin {job.stream}")
        self._model["begin"](number, job)

    def step(self, numbers: Sequence[int], ending: Sequence[int] = ()) -> StepTime | None:
        assert self._open.wait(PATIENCE_S)
        taken: StepTime | None = self._model["step"](numbers, ending)
        return taken

    def finish(self, numbers: Sequence[int]) -> list[np.ndarray]:
        self.said += [f"finish {self._streams[number]}" for number in numbers]
        waves: list[np.ndarray] = self._model["finish"](numbers)
        return waves

    def drop(self, numbers: Sequence[int]) -> None:
        self.said += [f"drop {self._streams[number]}" for number in numbers]
        self._model["drop"](numbers)

    def forget(self, streams: Sequence[str]) -> None:
        self.said += [f"forget {stream}" for stream in streams]
        self._model["forget"](streams)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Steps that begin meanwhile end afterwards."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def forgotten(self) -> list[str]:
        return [said.removeprefix("forget ") for said in self.said if said.startswith("forget ")]


async def model_of(engine: SoundEngine) -> Any:
    return await engine._call(lambda worker: worker.model_runner.model)  # type: ignore[arg-type]


@pytest_asyncio.fixture(loop_scope="session")
async def watch(engine: SoundEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watch]:
    await until_free(engine)
    model = await model_of(engine)
    seen = Watch(model)
    for name in Watch.METHODS:
        monkeypatch.setattr(model, name, getattr(seen, name))
    yield seen
    seen._open.set()


def spoken(request_id: str, voice: str = "Chelsie", seed: int = 0, *, streams: bool = True) -> OmniRequest:
    return OmniRequest(request_id, "", voice=voice, seed=seed, streams_audio=streams)


def codes(count: int, first: int = 0) -> StageChunk:
    """Codes `first` to `count` of a reply."""
    return codes_chunk(first, (int(c) for c in np.random.RandomState(1).randint(0, 8192, count)[first:]))


def joined(chunks: Sequence[StageChunk]) -> np.ndarray:
    return np.concatenate([chunk.audio.samples for chunk in chunks if chunk.audio is not None])


async def sound(engine: SoundEngine, asked: OmniRequest, upstream: AsyncIterator[StageChunk]) -> np.ndarray:
    return joined([chunk async for chunk in engine.generate(asked, upstream)])


async def until_free(engine: SoundEngine) -> None:
    await until_counts(engine, running=0, waiting=0, streams=0)


# ------------------------------------------------------------------ the sound


@pytest.mark.parametrize("count", [1, 24, 25, 61, 200])
async def test_pieces_follow_each_other_and_have_a_sample_for_each_of_a_code(engine: SoundEngine, count: int) -> None:
    chunks = [chunk async for chunk in engine.generate(spoken(f"all-{count}"), at_once([codes(count)]))]
    pieces: list[AudioChunk] = [chunk.audio for chunk in chunks if chunk.audio is not None]
    assert [piece.start for piece in pieces] == [0, *[piece.end for piece in pieces[:-1]]]
    assert pieces[-1].end == count * SAMPLES_PER_CODE
    assert {piece.sample_rate_hz for piece in pieces} == {24_000}
    assert np.abs(joined(chunks)).max() > 0.01
    assert [chunk.finish_reason for chunk in chunks] == [None] * len(pieces) + ["stop"]


async def test_sound_comes_while_codes_are_still_made(engine: SoundEngine) -> None:
    feed = Feed(codes(2 * BLOCK))
    async with contextlib.aclosing(engine.generate(spoken("early"), feed.read())) as chunks:
        first = await asyncio.wait_for(anext(chunks), PATIENCE_S)
        assert first.audio is not None and len(first.audio.samples) == BLOCK * SAMPLES_PER_CODE
        feed.give(codes(3 * BLOCK, first=2 * BLOCK))
        second = await asyncio.wait_for(anext(chunks), PATIENCE_S)
        assert second.audio is not None and second.audio.start == first.audio.end
        feed.end()
        rest = [chunk async for chunk in chunks]
    assert joined([first, second, *rest]).shape == (3 * BLOCK * SAMPLES_PER_CODE,)


async def test_configuration_says_how_large_a_piece_may_be(engine: SoundEngine) -> None:
    chunks = [chunk async for chunk in engine.generate(spoken("large"), at_once([codes(200)]))]
    sizes = [len(chunk.audio.samples) // SAMPLES_PER_CODE for chunk in chunks if chunk.audio is not None]
    assert max(sizes) == MAX_PIECE_BLOCKS * BLOCK


ASKED = [("Chelsie", 1, 130), ("Ethan", 2, 24), ("Ethan", 3, 77), ("Chelsie", 4, 5), ("Chelsie", 1, 60)]


async def test_streams_at_once_sound_as_each_does_alone(engine: SoundEngine) -> None:
    """More of them than may hold state, and in their own voice, seed and length."""
    alone = [await sound(engine, spoken("alone", v, s), at_once([codes(n)])) for v, s, n in ASKED]
    made = await asyncio.gather(
        *(sound(engine, spoken(f"many-{i}", v, s), at_once([codes(n)])) for i, (v, s, n) in enumerate(ASKED))
    )
    for one, expected in zip(made, alone, strict=True):
        np.testing.assert_allclose(one, expected, atol=SOUND_TOLERANCE, rtol=0)
    await until_free(engine)


async def test_whole_answers_beside_streams_sound_as_they_do_alone(engine: SoundEngine, watch: Watch) -> None:
    asked = [spoken("whole", seed=5, streams=False), spoken("stream", "Ethan", 6)]
    alone = [await sound(engine, one, at_once([codes(70)])) for one in asked]
    watch.begun.clear()
    with watch.held():
        first = asyncio.create_task(sound(engine, spoken("first"), at_once([codes(5)])))
        await until_counts(engine, running=1)
        both = [asyncio.create_task(sound(engine, one, at_once([codes(70)]))) for one in asked]
        await until_counts(engine, waiting=2)
    made = await asyncio.gather(*both)
    await first
    assert {job.stream for job in watch.begun} == {"first", None, "stream"}
    for one, expected in zip(made, alone, strict=True):
        np.testing.assert_allclose(one, expected, atol=SOUND_TOLERANCE, rtol=0)


async def test_a_piece_that_waits_takes_the_codes_that_come_meanwhile(engine: SoundEngine, watch: Watch) -> None:
    feed = Feed(codes(2 * BLOCK))
    async with contextlib.aclosing(engine.generate(spoken("grows"), feed.read())) as chunks:
        with watch.held():
            busy = asyncio.create_task(sound(engine, spoken("busy"), at_once([codes(1)])))
            await until_counts(engine, running=1)
            piece = asyncio.ensure_future(anext(chunks))
            await until_counts(engine, waiting=1)
            feed.give(codes(3 * BLOCK, 2 * BLOCK))
            await until(feed.is_read)
        first = await piece
        feed.end()
        rest = [first, *[chunk async for chunk in chunks]]
    await busy
    assert next(len(job.codes) for job in watch.begun if job.stream == "grows") == 3 * BLOCK
    assert len(joined(rest)) == 3 * BLOCK * SAMPLES_PER_CODE and len(joined([first])) == 2 * BLOCK * SAMPLES_PER_CODE


async def test_a_stream_named_as_one_before_it_begins_anew(engine: SoundEngine) -> None:
    first, again = [await sound(engine, spoken("name", seed=8), at_once([codes(60)])) for _ in range(2)]
    np.testing.assert_array_equal(first, again)


async def test_without_codes_there_is_no_sound_and_nothing_to_forget(engine: SoundEngine, watch: Watch) -> None:
    chunks = [chunk async for chunk in engine.generate(spoken("mute"), at_once([StageChunk(finish_reason="stop")]))]
    assert chunks == [StageChunk(finish_reason="stop")] and watch.said == []


# ---------------------------------------------------------------- what is due first


async def test_pieces_that_are_due_first_are_made_first(engine: SoundEngine, watch: Watch) -> None:
    """A newcomer's first piece is due at once, a later piece when its client has heard the one before, whole sound
    when it would have been heard."""
    feed = Feed(codes(2 * BLOCK))
    async with contextlib.aclosing(engine.generate(spoken("later"), feed.read())) as chunks:
        await anext(chunks)
        watch.said.clear()
        with watch.held():
            busy = asyncio.create_task(sound(engine, spoken("busy"), at_once([codes(1)])))
            await until_counts(engine, running=1)
            whole = asyncio.create_task(sound(engine, spoken("w", streams=False), at_once([codes(300)])))
            await until_counts(engine, waiting=1)
            piece = asyncio.ensure_future(anext(chunks))
            feed.give(codes(4 * BLOCK, 2 * BLOCK))
            await until_counts(engine, waiting=2)
            new = asyncio.create_task(sound(engine, spoken("new"), at_once([codes(1)])))
            await until_counts(engine, waiting=3)
        await asyncio.gather(busy, whole, piece, new)
    order = [said for said in watch.said if said in ("finish new", "finish later", "finish None")]
    assert order[-1] == "finish None" and len(order) == 3
    await until_free(engine)


async def test_a_piece_is_begun_while_the_one_before_it_is_made(engine: SoundEngine, watch: Watch) -> None:
    feed = Feed(codes(2 * BLOCK))
    async with contextlib.aclosing(engine.generate(spoken("follows"), feed.read())) as chunks:
        with watch.held():
            first = asyncio.ensure_future(anext(chunks))
            await until_counts(engine, running=1)
            feed.give(codes(4 * BLOCK, 2 * BLOCK))
            await until_counts(engine, running=1, waiting=1, held=1)
        made = [await first, await anext(chunks)]
        feed.end()
        made += [chunk async for chunk in chunks]
    said = [said for said in watch.said if "follows" in said]
    assert said[:3] == ["begin follows", "begin follows", "finish follows"]
    alone = await sound(engine, spoken("follows"), at_once([codes(4 * BLOCK)]))
    np.testing.assert_allclose(joined(made), alone, atol=EDGE_TOLERANCE, rtol=0)
    await until_free(engine)


# ---------------------------------------------- a request that is begun again


def as_audio(chunks: Sequence[StageChunk]) -> list[AudioChunk]:
    return [chunk.audio for chunk in chunks if chunk.audio is not None]


DELIVERED = (1, 30 * SAMPLES_PER_CODE, 5 * BLOCK * SAMPLES_PER_CODE, 11 * BLOCK * SAMPLES_PER_CODE + 1234)
"""Within the first code; within a block; at a border of two; within a block behind larger pieces."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def uncut(engine: SoundEngine) -> tuple[np.ndarray, np.ndarray]:
    """What is cut: whole, and as a stream."""
    whole, stream = (spoken(f"uncut-{streams}", "Ethan", 4, streams=streams) for streams in (False, True))
    return await sound(engine, whole, at_once([codes(200)])), await sound(engine, stream, at_once([codes(200)]))


@pytest.mark.parametrize(
    "delivered", [*(pytest.param(each, marks=pytest.mark.full) for each in DELIVERED[:-1]), DELIVERED[-1]]
)
async def test_sound_goes_on_where_it_was_cut(
    engine: SoundEngine, uncut: tuple[np.ndarray, np.ndarray], watch: Watch, delivered: int
) -> None:
    whole, undisturbed = uncut
    asked = replace(spoken("again", "Ethan", 4), known={"code2wav": KnownOutput(num_samples=delivered)})
    again = [chunk async for chunk in engine.generate(asked, at_once([codes(200)]))]
    parts = as_audio(again)
    assert [part.start for part in parts] == [delivered, *(part.end for part in parts[:-1])]
    assert again[-1].finish_reason == "stop"
    joint = np.concatenate([undisturbed[:delivered], joined(again)])
    assert joint.shape == whole.shape
    with np.errstate(divide="ignore"):  # where both were cut into the same pieces
        assert snr_db(joint, undisturbed) >= STREAMING_SNR_DB
    assert snr_db(joint, whole) >= STREAMING_SNR_DB
    around = slice(max(0, delivered - SEAM_SAMPLES), delivered + SEAM_SAMPLES)
    assert snr_db(joint[around], whole[around]) >= STREAMING_SNR_DB
    assert [job.is_heard for job in watch.begun].count(True) == len(parts)
    silent_blocks = sum(len(job.codes) // BLOCK - 1 for job in watch.begun if not job.is_heard)
    assert silent_blocks == min(REPLAYED_BLOCKS, delivered // (BLOCK * SAMPLES_PER_CODE))


async def test_the_rest_of_a_whole_answer_is_the_wholes(engine: SoundEngine) -> None:
    asked = spoken("all", streams=False)
    whole = await sound(engine, asked, at_once([codes(70)]))
    known = {"code2wav": KnownOutput(num_samples=12345)}
    (rest, _) = [c async for c in engine.generate(replace(asked, known=known), at_once([codes(70)]))]
    assert rest.audio is not None and rest.audio.start == 12345
    np.testing.assert_allclose(rest.audio.samples, whole[12345:], atol=SOUND_TOLERANCE, rtol=0)


@pytest.mark.parametrize("streams", [True, False])
async def test_of_sound_that_was_delivered_to_its_end_nothing_is_left(engine: SoundEngine, streams: bool) -> None:
    known = {"code2wav": KnownOutput(num_samples=70 * SAMPLES_PER_CODE)}
    asked = replace(spoken("told", streams=streams), known=known)
    assert [c async for c in engine.generate(asked, at_once([codes(70)]))] == [StageChunk(finish_reason="stop")]
    ended = {"code2wav": KnownOutput(num_samples=70 * SAMPLES_PER_CODE, finish_reason="stop")}
    unread = engine.generate(replace(asked, known=ended), Feed().read())
    assert [c async for c in unread] == [StageChunk(finish_reason="stop")]
    await until_free(engine)


async def test_sound_behind_what_was_delivered_is_due_at_once(engine: SoundEngine) -> None:
    """What nobody hears is no sound that a player has left: what follows it is as urgent as a first piece."""
    known = {"code2wav": KnownOutput(num_samples=8 * BLOCK * SAMPLES_PER_CODE)}
    asked, playback = replace(spoken("urgent"), known=known), Playback()
    session = engine._session(asked, at_once([codes(11 * BLOCK)]))
    due: list[float] = []
    async for _, samples in engine._running_loop().waveforms(session, playback):
        due.append(playback.left_s(0.0) if not samples.any() else 1.0)
    assert due[0] == 0.0 and len(due) > 1 and all(due[1:])


# ------------------------------------------------------- how late a stream begins


@pytest.fixture
def for_an_hour(engine: SoundEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks have come so late that a first one is delayed until its client leaves."""
    playout = PlayoutDelay(3_600.0)
    playout.came(3_600.0, time.monotonic())
    monkeypatch.setattr(engine, "_playout", playout)


async def test_the_next_chunks_are_made_while_the_first_is_delayed_and_all_is_left_with_its_client(
    engine: SoundEngine, watch: Watch, for_an_hour: None
) -> None:
    async with contextlib.aclosing(engine.generate(spoken("late"), at_once([codes(5 * BLOCK)]))) as chunks:
        first = asyncio.create_task(anext(chunks))
        while watch.said.count("finish late") < 3:
            assert not first.done()
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    assert first.cancelled()
    await until_free(engine)
    assert watch.forgotten() == ["late"]


async def test_neither_a_whole_answer_nor_a_stream_that_is_begun_again_is_delayed(
    engine: SoundEngine, for_an_hour: None
) -> None:
    assert len(await sound(engine, spoken("whole", streams=False), at_once([codes(30)]))) == 30 * SAMPLES_PER_CODE
    known = {"code2wav": KnownOutput(num_samples=SAMPLES_PER_CODE)}
    again = sound(engine, replace(spoken("again"), known=known), at_once([codes(30)]))
    assert len(await asyncio.wait_for(again, PATIENCE_S)) == 29 * SAMPLES_PER_CODE


async def test_streams_say_how_late_their_chunks_come_and_whole_answers_do_not(
    engine: SoundEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    monkeypatch.setattr(engine._playout, "came", lambda late_s, now_s: told.append(late_s))
    await sound(engine, spoken("whole", streams=False), at_once([codes(200)]))
    assert told == []
    chunks = [chunk async for chunk in engine.generate(spoken("told"), at_once([codes(200)]))]
    assert len(told) == sum(chunk.audio is not None for chunk in chunks) - 1 > 1


# ---------------------------------------------------------- how a stream ends


async def test_a_stream_that_is_done_is_forgotten(engine: SoundEngine, watch: Watch) -> None:
    await sound(engine, spoken("done"), at_once([codes(40)]))
    await until_free(engine)
    assert watch.forgotten() == ["done"] and watch.said[-1] == "forget done"


async def test_whole_answers_have_no_state_to_forget(engine: SoundEngine, watch: Watch) -> None:
    await sound(engine, spoken("whole", streams=False), at_once([codes(40)]))
    await until_free(engine)
    assert watch.forgotten() == []


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def assert_all_places_are_free(engine: SoundEngine) -> None:
    """As many streams as may hold state get their first piece and keep it; none more."""
    await until_free(engine)
    async with contextlib.AsyncExitStack() as streams:
        for i in range(MAX_STREAMS):
            chunks = engine.generate(spoken(f"place-{i}"), Feed(codes(2 * BLOCK)).read())
            await streams.enter_async_context(contextlib.aclosing(chunks))
            await asyncio.wait_for(anext(chunks), PATIENCE_S)
        assert (await engine.counts())["streams"] == MAX_STREAMS
        surplus = asyncio.create_task(sound(engine, spoken("surplus"), at_once([codes(2 * BLOCK)])))
        await until_counts(engine, waiting=1, running=0)
        await cancelled(surplus)
    await until_free(engine)


async def test_a_stream_closed_between_two_pieces_is_forgotten(engine: SoundEngine, watch: Watch) -> None:
    chunks = engine.generate(spoken("between"), Feed(codes(2 * BLOCK)).read())
    await anext(chunks)
    await chunks.aclose()
    await until_free(engine)
    assert watch.forgotten() == ["between"]
    await assert_all_places_are_free(engine)


async def test_a_stream_cancelled_before_its_first_piece_holds_nothing(engine: SoundEngine, watch: Watch) -> None:
    task = asyncio.create_task(sound(engine, spoken("before"), Feed(codes(5)).read()))
    await asyncio.sleep(0)
    await cancelled(task)
    assert watch.said == []
    await assert_all_places_are_free(engine)


async def test_a_stream_cancelled_while_its_piece_waits_is_not_made(engine: SoundEngine, watch: Watch) -> None:
    with watch.held():
        other = asyncio.create_task(sound(engine, spoken("other"), at_once([codes(5)])))
        await until_counts(engine, running=1)
        task = asyncio.create_task(sound(engine, spoken("queued"), at_once([codes(5)])))
        await until_counts(engine, waiting=1)
        await cancelled(task)
        assert (await engine.counts())["waiting"] == 0
    await other
    await assert_all_places_are_free(engine)
    assert "queued" not in [job.stream for job in watch.begun]


async def test_a_stream_cancelled_while_its_piece_is_made_leaves_at_the_next_step(
    engine: SoundEngine, watch: Watch
) -> None:
    with watch.held():
        task = asyncio.create_task(sound(engine, spoken("running"), at_once([codes(40)])))
        await until_counts(engine, running=1)
        await cancelled(task)
        assert (await engine.counts())["streams"] == 1
    await until_free(engine)
    assert watch.said == ["begin running", "drop running", "forget running"]
    await assert_all_places_are_free(engine)


async def test_its_name_may_be_used_again_while_its_last_piece_is_still_made(engine: SoundEngine, watch: Watch) -> None:
    expected = await sound(engine, spoken("plain", seed=9), at_once([codes(60)]))
    with watch.held():
        task = asyncio.create_task(sound(engine, spoken("again", seed=1), at_once([codes(100)])))
        await until_counts(engine, running=1)
        await cancelled(task)
        again = asyncio.create_task(sound(engine, spoken("again", seed=9), at_once([codes(60)])))
        await until_counts(engine, waiting=1)
    np.testing.assert_allclose(await again, expected, atol=SOUND_TOLERANCE, rtol=0)
    await until_free(engine)


async def test_a_stream_cancelled_while_it_waits_for_a_place_leaves_it_to_others(
    engine: SoundEngine, watch: Watch
) -> None:
    holders = [engine.generate(spoken(f"holder-{i}"), Feed(codes(2 * BLOCK)).read()) for i in range(MAX_STREAMS)]
    for holder in holders:
        await anext(holder)
    task = asyncio.create_task(sound(engine, spoken("outside"), at_once([codes(5)])))
    await until_counts(engine, waiting=1, running=0)
    next_one = asyncio.create_task(sound(engine, spoken("next"), at_once([codes(5)])))
    await until_counts(engine, waiting=2)
    await cancelled(task)
    await holders[0].aclose()
    assert len(await asyncio.wait_for(next_one, PATIENCE_S)) == 5 * SAMPLES_PER_CODE
    for holder in holders[1:]:
        await holder.aclose()
    assert "outside" not in [job.stream for job in watch.begun]
    await assert_all_places_are_free(engine)


class UpstreamBroke(Exception):
    pass


async def test_a_stream_whose_source_breaks_raises_that_and_is_forgotten(engine: SoundEngine, watch: Watch) -> None:
    feed = Feed(codes(2 * BLOCK))
    with pytest.raises(UpstreamBroke):
        async for _ in engine.generate(spoken("broken"), feed.read()):
            feed.fail(UpstreamBroke())
    await until_free(engine)
    assert watch.forgotten() == ["broken"]
    await assert_all_places_are_free(engine)


# ------------------------------------------------------------ what breaks, and what does not


@contextlib.asynccontextmanager
async def joining_one_step(engine: SoundEngine, watch: Watch, count: int) -> AsyncIterator[None]:
    """The jobs of `count` requests that are asked for in this context may all begin with the next step."""
    with watch.held():
        busy = asyncio.create_task(sound(engine, spoken("busy"), at_once([codes(1)])))
        await until_counts(engine, running=1)
        yield
        await until_counts(engine, waiting=count)
    await busy


TOGETHER = [spoken("beside-0", "Ethan", 1), spoken("beside-1", "Chelsie", 2, streams=False)]


async def test_a_code_that_is_none_fails_its_own_request_before_it_is_in_a_step(
    engine: SoundEngine, watch: Watch
) -> None:
    alone = [await sound(engine, one, at_once([codes(70)])) for one in TOGETHER]
    async with joining_one_step(engine, watch, 2):
        bad = asyncio.create_task(sound(engine, spoken("bad"), at_once([codes_chunk(0, (5, 9000))])))
        good = [asyncio.create_task(sound(engine, one, at_once([codes(70)]))) for one in TOGETHER]
    with pytest.raises(TokenError, match="token 9000 is no code of sound; codes are 0 to 8193"):
        await asyncio.wait_for(bad, PATIENCE_S)
    for made, expected in zip(await asyncio.gather(*good), alone, strict=True):
        np.testing.assert_allclose(made, expected, atol=SOUND_TOLERANCE, rtol=0)
    assert "bad" not in {job.stream for job in watch.begun}
    await engine.check_health()
    await assert_all_places_are_free(engine)


async def assert_only_the_cursed_fails(engine: SoundEngine, watch: Watch, alone: Sequence[np.ndarray]) -> None:
    """Beside it are others, each of which must sound as it does alone."""
    async with joining_one_step(engine, watch, 3):
        cursed = asyncio.create_task(sound(engine, spoken("cursed", seed=CURSED), at_once([codes(70)])))
        good = [asyncio.create_task(sound(engine, one, at_once([codes(70)]))) for one in TOGETHER]
    with pytest.raises(JobFailed, match="stage code2wav could not make the sound: it broke"):
        await asyncio.wait_for(cursed, PATIENCE_S)
    for made, expected in zip(await asyncio.gather(*good), alone, strict=True):
        np.testing.assert_allclose(made, expected, atol=SOUND_TOLERANCE, rtol=0)
    await engine.check_health()
    await assert_all_places_are_free(engine)


CURSED = 13


async def test_a_job_that_breaks_its_step_fails_alone(
    engine: SoundEngine, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the step's last evaluation: by then every stream in it has written its keys and values."""
    alone = [await sound(engine, one, at_once([codes(70)])) for one in TOGETHER]
    model = await model_of(engine)
    advance, velocity, broke = model._flow.advance, model._dit.velocity, []
    taking: list[int] = []

    def watched(jobs: Any) -> None:
        taking[:] = [piece.job.seed for flow in jobs for piece in model._pieces.values() if piece.flow is flow]
        advance(jobs)

    def breaks_beside_another(point: torch.Tensor, *given: Any) -> torch.Tensor:
        made: torch.Tensor = velocity(point, *given)
        if point[0] % EVALUATIONS == EVALUATIONS - 1 and (len(taking) > 1 or taking == [CURSED]):
            broke.append(list(taking))
            raise RuntimeError("it broke")
        return made

    monkeypatch.setattr(model._flow, "advance", watched)
    monkeypatch.setattr(model._dit, "velocity", breaks_beside_another)
    await assert_only_the_cursed_fails(engine, watch, alone)
    assert [CURSED] in broke and max(map(len, broke)) > 1


async def test_a_job_that_breaks_the_vocoder_fails_alone(
    engine: SoundEngine, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [await sound(engine, one, at_once([codes(70)])) for one in TOGETHER]
    model = await model_of(engine)
    vocode = model._vocode

    def breaks_beside_another(pieces: Any, windows: Any) -> Any:
        made = vocode(pieces, windows)
        if len(pieces) > 1 or pieces[0].job.seed == CURSED:
            raise RuntimeError("it broke")
        return made

    monkeypatch.setattr(model, "_vocode", breaks_beside_another)
    await assert_only_the_cursed_fails(engine, watch, alone)


@pytest.mark.parametrize(
    ("error", "is_sticky"),
    [
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("Worker failed with error 'CUDA error: an illegal memory access was encountered'"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("Executor failed."), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("Worker failed with error 'CUDA out of memory'"), False),
        (IndexError("index out of range"), False),
        (PayloadError("A job has the code -1: CUDA error"), False),
    ],
)
def test_errors_that_end_a_device_are_told_from_those_of_a_job(error: Exception, is_sticky: bool) -> None:
    assert is_device_error(error) is is_sticky


@pytest.mark.gpu
def test_what_a_card_says_after_an_index_out_of_range_is_such_an_error() -> None:
    """In a process of its own, for which the card is lost then."""
    code = """
        import torch
        from omni_cluster.engine.sound.engine import is_device_error
        for _ in range(2):
            try:
                torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].cpu()
            except RuntimeError as error:
                print(is_device_error(error))
    """
    made = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert made.stdout.split() == ["True", "True"]


@pytest.mark.gpu
def test_an_index_out_of_range_on_a_card_stops_the_stage_and_its_health_says_so() -> None:
    """In a process of its own, for which the card is lost then."""
    code = """
        import asyncio
        import torch
        from omni_cluster.types.errors import SoundEngineStopped
        from tests.engine.stages import at_once, running
        from tests.engine.sound.test_engine import codes, config, sound, spoken

        def out_of_range(*_):
            return torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].cpu()

        async def says_that_it_stopped(awaited):
            try:
                await awaited
            except SoundEngineStopped as stopped:
                print(stopped, flush=True)

        async def main():
            async with running(config(), "code2wav") as engine:
                await sound(engine, spoken("before"), at_once([codes(30)]))
                await engine.check_health()
                model = await engine._call(lambda worker: worker.model_runner.model)
                model._vocode = out_of_range
                await says_that_it_stopped(sound(engine, spoken("breaks"), at_once([codes(30)])))
                await says_that_it_stopped(engine.check_health())
                await says_that_it_stopped(sound(engine, spoken("after"), at_once([codes(30)])))

        asyncio.run(main())
    """
    made = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert [line for line in made.stdout.splitlines() if line.startswith("stage code2wav does not run")] == [
        "stage code2wav does not run any more; send the request again.",
        "stage code2wav does not run; start it again.",
        "stage code2wav does not run any more; send the request again.",
    ]


async def test_an_idle_stage_asks_its_device_whether_it_still_computes(
    engine: SoundEngine, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at work does not: each step asks."""

    def broke() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    async def has_begun() -> bool:
        return bool(watch.begun)

    monkeypatch.setattr(sound_worker.DEVICE, "ask", broke)
    with watch.held():
        busy = asyncio.create_task(sound(engine, spoken("busy"), at_once([codes(1)])))
        await until(has_begun)
        await engine.check_health()
    await busy
    await assert_all_places_are_free(engine)
    with pytest.raises(SoundEngineStopped, match="stage code2wav does not run any more"):
        await engine.check_health()


@pytest.mark.gpu
def test_an_error_of_a_card_that_nobody_waited_for_is_found_by_an_idle_stage() -> None:
    """In a process of its own, for which the card is lost then."""
    code = """
        import asyncio
        import torch
        from omni_cluster.types.errors import SoundEngineStopped
        from tests.engine.stages import running
        from tests.engine.sound.test_engine import config

        def out_of_range(worker):
            torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]

        async def main():
            async with running(config(), "code2wav") as engine:
                await engine.check_health()
                await engine._call(out_of_range)
                try:
                    while True:
                        await engine.check_health()
                except SoundEngineStopped as stopped:
                    print(stopped, flush=True)

        asyncio.run(main())
    """
    made = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, timeout=300)
    assert "stage code2wav does not run any more; send the request again." in made.stdout.splitlines()


async def test_a_step_that_never_ends_is_a_stall_and_waiting_for_codes_is_none(
    engine: SoundEngine, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(engine._probe, "_watch", StallWatch("code2wav", 10.0, lambda: now_s[0]))

    async def looks(count: int) -> None:
        for _ in range(count):
            now_s[0] += 2
            await engine.check_health()

    async with contextlib.aclosing(engine.generate(spoken("waits"), Feed(codes(2 * BLOCK)).read())) as chunks:
        await anext(chunks)
        await looks(10)  # for codes
    with watch.held():
        busy = asyncio.create_task(sound(engine, spoken("busy"), at_once([codes(1)])))
        await until_counts(engine, running=1)
        await looks(5)
        with pytest.raises(StageDied, match=r"code2wav has taken no step for 1\d s"):
            await looks(2)
    await busy
    await looks(10)


async def test_no_more_streams_than_configured_are_in_the_model_at_once(engine: SoundEngine, watch: Watch) -> None:
    made = await asyncio.gather(
        *(sound(engine, spoken(f"crowd-{i}"), at_once([codes(30 + i)])) for i in range(4 * MAX_STREAMS))
    )
    assert [len(one) for one in made] == [(30 + i) * SAMPLES_PER_CODE for i in range(4 * MAX_STREAMS)]
    await until_free(engine)
    alive: set[str] = set()
    for said in watch.said:
        verb, *names = said.split()
        alive = alive | set(names) if verb == "begin" else alive - set(names if verb == "forget" else ())
        assert len(alive) <= MAX_STREAMS
    assert sorted(watch.forgotten()) == sorted(f"crowd-{i}" for i in range(4 * MAX_STREAMS))


# ------------------------------------------------------------- how the stage ends


async def test_shutdown_ends_what_runs_and_what_waits() -> None:
    async with running(config(), "code2wav") as stage:
        assert isinstance(stage, SoundEngine)
        model = await model_of(stage)
        seen = Watch(model)
        model.step = seen.step
        with seen.held():
            first = asyncio.create_task(sound(stage, spoken("runs"), at_once([codes(5)])))
            await until_counts(stage, running=1)
            queued = [
                asyncio.create_task(sound(stage, spoken(f"waits-{i}"), at_once([codes(5)]))) for i in range(MAX_STREAMS)
            ]
            await until_counts(stage, waiting=MAX_STREAMS)
            ending = asyncio.create_task(stage.shutdown())
            ended = await asyncio.wait_for(asyncio.gather(first, *queued, return_exceptions=True), PATIENCE_S)
        await ending
        assert [type(error) for error in ended] == [SoundEngineStopped] * (MAX_STREAMS + 1)
        with pytest.raises(SoundEngineStopped):
            await stage.check_health()


async def test_a_start_that_is_cancelled_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that is being made meanwhile is ended, and the event loop goes on until it is."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    class Slow:
        is_gone = False

        def __init__(self, args: object) -> None:
            begun.set()
            go_on.wait(PATIENCE_S)

        def shutdown(self) -> None:
            ended.set()

    monkeypatch.setattr("omni_cluster.engine.sound.engine.StageWorker", Slow)
    engine = make_stage(config().stages[-1], bind(config()))
    starting = asyncio.create_task(engine.start())
    await asyncio.to_thread(begun.wait, PATIENCE_S)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    ending = asyncio.create_task(engine.shutdown())
    await asyncio.sleep(0)
    assert not ending.done()
    go_on.set()
    await asyncio.wait_for(ending, PATIENCE_S)
    assert ended.is_set()
    await engine.shutdown()


async def test_an_error_of_the_device_ends_the_stage_at_once_and_all_who_wait_for_it() -> None:
    async with running(config(), "code2wav") as stage:
        assert isinstance(stage, SoundEngine)
        model = await model_of(stage)
        seen, steps = Watch(model), []

        def breaks(numbers: Sequence[int], ending: Sequence[int]) -> StepTime | None:
            steps.append(numbers)
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

        seen._model["step"], model.step = breaks, seen.step
        with seen.held():
            first = asyncio.create_task(sound(stage, spoken("runs"), at_once([codes(5)])))
            await until_counts(stage, running=1)
            queued = asyncio.create_task(sound(stage, spoken("waits"), at_once([codes(5)])))
            await until_counts(stage, waiting=1)
        ended = await asyncio.wait_for(asyncio.gather(first, queued, return_exceptions=True), PATIENCE_S)
        assert [type(error) for error in ended] == [SoundEngineStopped] * 2 and len(steps) == 1
        with pytest.raises(StageDied):
            await stage.check_health()
        with pytest.raises(StageDied):
            stage.check_runs()
        with pytest.raises(SoundEngineStopped):
            await sound(stage, spoken("late"), at_once([codes(5)]))


async def test_a_stage_without_a_source_says_so(engine: SoundEngine) -> None:
    with pytest.raises(ConfigError, match="engine_input_source"):
        await anext(engine.generate(spoken("alone"), None))


# ------------------------------------------------------------- in the pipeline


def long_reply(request_id: str, **fields: Any) -> OmniRequest:
    return request(request_id, sampling={"talker": {"max_tokens": 200}}, streams_audio=True, **fields)


def codes_said(output: OmniRequestOutput) -> int:
    return output.codec_tokens


async def test_a_streamed_reply_of_the_pipeline_has_every_sample_once(pipeline: AsyncOmniLLM) -> None:
    pieces: list[AudioChunk] = []
    said = 0
    async for event in pipeline.stream(long_reply("piecewise")):
        said += len(event.chunk.made) if event.stage == "talker" else 0
        if event.chunk.audio is not None:
            pieces.append(event.chunk.audio)
    assert said == 200 and len(pieces) > 1
    assert [piece.start for piece in pieces] == [0, *[piece.end for piece in pieces[:-1]]]
    assert pieces[-1].end == said * SAMPLES_PER_CODE


async def test_streamed_replies_at_once_sound_as_each_does_alone(pipeline: AsyncOmniLLM) -> None:
    asked = [("Chelsie", 1, 120), ("Ethan", 2, 90), ("Ethan", 3, 30)]

    async def reply(name: str, voice: str, seed: int, count: int) -> OmniRequestOutput:
        sampling = {"talker": {"max_tokens": count}}
        return await pipeline.generate(request(name, voice=voice, seed=seed, sampling=sampling, streams_audio=True))

    alone = [await reply(f"one-{i}", *one) for i, one in enumerate(asked)]
    made = await asyncio.gather(*(reply(f"all-{i}", *one) for i, one in enumerate(asked)))
    for output, expected, (_, _, count) in zip(made, alone, asked, strict=True):
        assert output.codes == expected.codes and codes_said(output) == count
        assert output.audio is not None and expected.audio is not None
        assert len(output.audio.samples) == count * SAMPLES_PER_CODE
        np.testing.assert_allclose(output.audio.samples, expected.audio.samples, atol=EDGE_TOLERANCE, rtol=0)


@pytest.mark.parametrize("leaves", ["first sound", "first code"])
async def test_a_streamed_reply_that_is_left_frees_every_stage(pipeline: AsyncOmniLLM, leaves: str) -> None:
    wanted: Callable[[Any], bool] = (
        (lambda event: event.chunk.audio is not None) if leaves == "first sound" else (lambda e: e.stage == "talker")
    )
    events = pipeline.stream(long_reply(f"left-at-{leaves}"))
    async for event in events:
        if wanted(event):
            break
    await events.aclose()
    await until_counts(pipeline._stages["code2wav"], running=0, waiting=0, streams=0)
    for stage in ("thinker", "talker"):
        await until_counts(pipeline._stages[stage], running=0, waiting=0, held=0, kv_blocks_used=0)
