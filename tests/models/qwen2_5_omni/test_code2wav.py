"""How the talker's codes become jobs: all at once, or piece by piece while more of them come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig

from omni_cluster.models.checkpoint_files import read_config
from omni_cluster.models.qwen2_5_omni.code2wav import (
    DIT_DEFAULTS,
    REPLAYED_BLOCKS,
    VOCODER_DEFAULTS,
    Code2WavSession,
    CodeBlocks,
    piece_range,
)
from omni_cluster.models.qwen2_5_omni.special_ids import SpecialIds
from omni_cluster.models.sound import SoundJob
from omni_cluster.types.errors import TokenError
from omni_cluster.types.inputs import KnownOutput, OmniRequest
from omni_cluster.types.outputs import StageChunk
from tests.codes import codes_chunk
from tests.engine.stages import PATIENCE_S, Feed, at_once

IDS = SpecialIds(codec_pad=92, codec_bos=93, codec_eos=94, codec_mask=96, text_pad=1, text_eos=2, num_codes=80)
BLOCKS = CodeBlocks(frames_per_code=2, codes_per_block=12, samples_per_frame=240)
BLOCK = BLOCKS.codes_per_block
SAMPLES_PER_CODE = BLOCKS.samples_per_code


def session_of(
    upstream: AsyncIterator[StageChunk],
    *,
    streams: bool = True,
    max_piece_blocks: int = 16,
    delivered: int = 0,
    look_ahead: int | None = None,
) -> Code2WavSession:
    known = {"code2wav": KnownOutput(num_samples=delivered)}
    request = OmniRequest("r", "", seed=3, streams_audio=streams, known=known)
    return Code2WavSession(request, upstream, IDS, BLOCKS, "Ethan", max_piece_blocks, look_ahead)


async def whole(*chunks: StageChunk) -> list[SoundJob]:
    return [job async for job in session_of(at_once(list(chunks)), streams=False).jobs()]


def codes(start: int, end: int) -> StageChunk:
    """Codes `start` to `end` of a request, each told from the next."""
    return codes_chunk(start, (i % 80 for i in range(start, end)))


def told(job: SoundJob) -> tuple[Any, ...]:
    """A job's fields, of which those that are equal make equal sound."""
    return (codes_of(job), job.samples, job.size, job.voice, job.seed, job.stream, job.look_ahead, job.is_heard)


def codes_of(job: SoundJob) -> list[int]:
    assert job.codes.dtype == np.int16 and job.codes.shape == (len(job.codes), 1)
    return job.codes[:, 0].tolist()


def start_of(job: SoundJob) -> int:
    """The request's code that the job begins with."""
    return job.samples.start // SAMPLES_PER_CODE


def sizes(jobs: Sequence[SoundJob]) -> list[int]:
    """Codes that each piece makes sound of."""
    return [len(job.codes) - job.look_ahead for job in jobs]


async def pieces(upstream: AsyncIterator[StageChunk], **settings: Any) -> list[SoundJob]:
    return [job async for job in session_of(upstream, **settings).jobs()]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("bad", [80, 93, 96, -1, 8293])
async def test_what_is_no_code_ends_its_request_before_it_is_in_a_job(bad: int, streams: bool) -> None:
    chunks = [codes(0, 30), codes_chunk(30, (5, bad, 6)), codes(33, 100), StageChunk(finish_reason="length")]
    session, made = session_of(at_once(chunks), streams=streams), []
    with pytest.raises(TokenError, match=f"^token {bad} is no code of sound; codes are 0 to 79.$"):
        async for job in session.jobs():
            made.append(job)
    assert all(bad not in job.codes for job in made)


# ----------------------------------------------------------------- whole mode


async def test_all_codes_are_one_job_in_the_requests_voice_and_seed() -> None:
    made = await whole(codes_chunk(0, (5, 6)), codes_chunk(2, (7,)), StageChunk(finish_reason="length"))
    assert [told(job) for job in made] == [([5, 6, 7], range(3 * SAMPLES_PER_CODE), 6, "Ethan", 3, None, 0, True)]


async def test_codes_that_come_twice_are_dropped() -> None:
    made = await whole(codes_chunk(0, (5, 6)), codes_chunk(0, (5, 6)), codes_chunk(1, (6, 7, 8)), codes_chunk(4, (9,)))
    assert [codes_of(job) for job in made] == [[5, 6, 7, 8, 9]]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("chunks", [[], [StageChunk(finish_reason="stop")], [StageChunk(0, (5,))]])
async def test_without_codes_there_is_no_job(chunks: list[StageChunk], streams: bool) -> None:
    assert await pieces(at_once(chunks), streams=streams) == []


async def test_a_long_reply_stays_one_job_when_it_is_not_streamed() -> None:
    (job,) = await whole(codes(0, 1000))
    assert (len(job.codes), job.stream, job.look_ahead) == (1000, None, 0)


# ------------------------------------------------------------------ streaming


def check_plan(
    made: list[SoundJob], total: int, max_piece_blocks: int, first: int = 0, look_ahead: int = BLOCK
) -> None:
    """What holds of all pieces of a stream that begins at its code `first`, however the codes came."""
    wanted = [i % 80 for i in range(total)]
    assert [start_of(job) for job in made] == [first + sum(sizes(made)[:i]) for i in range(len(made))]
    assert sum(sizes(made)) == total - first
    for job, size in zip(made, sizes(made), strict=True):
        start = start_of(job)
        assert codes_of(job) == wanted[start : start + len(job.codes)]
        assert job.samples == range(start * SAMPLES_PER_CODE, (start + size) * SAMPLES_PER_CODE)
        assert (job.stream, job.voice, job.seed, job.size) == ("r", "Ethan", 3, 2 * len(job.codes))
        assert 0 < len(job.codes) - job.look_ahead <= max(max_piece_blocks * BLOCK, BLOCK + look_ahead - 1)
    for job in made[:-1]:
        assert (len(job.codes) - job.look_ahead) % BLOCK == 0 and job.look_ahead == look_ahead
    assert all(job.look_ahead == 0 for job in made[-1:])


@given(st.integers(0, 700), st.integers(2, 20))
async def test_codes_that_are_all_there_are_covered_once_in_order(total: int, max_piece_blocks: int) -> None:
    made = await pieces(at_once([codes(0, total)]), max_piece_blocks=max_piece_blocks)
    check_plan(made, total, max_piece_blocks)


@given(st.integers(0, 700), st.integers(2, 20), st.integers(1, BLOCK))
async def test_a_piece_looks_as_far_ahead_as_it_is_told_to(total: int, max_piece_blocks: int, look_ahead: int) -> None:
    made = await pieces(at_once([codes(0, total)]), max_piece_blocks=max_piece_blocks, look_ahead=look_ahead)
    check_plan(made, total, max_piece_blocks, look_ahead=look_ahead)


@given(st.lists(st.integers(0, 90), max_size=12), st.lists(st.booleans(), min_size=12), st.integers(2, 20))
async def test_codes_that_come_in_bursts_are_covered_once_in_order_by_pieces_of_the_plan(
    bursts: list[int], asked_after: list[bool], max_piece_blocks: int
) -> None:
    feed, total, made = Feed(), sum(bursts), []
    async with contextlib.aclosing(session_of(feed.read(), max_piece_blocks=max_piece_blocks).jobs()) as jobs:
        asked = asyncio.ensure_future(anext(jobs, None))
        start, upstream_ended = 0, False
        ends: list[bool] = []

        async def take() -> None:
            nonlocal asked
            while asked.done() and (job := asked.result()) is not None:
                made.append(job)
                ends.append(upstream_ended)
                asked = asyncio.ensure_future(anext(jobs, None))
                await settled()

        for burst, look in zip(bursts, asked_after, strict=False):
            feed.give(codes(start, start + burst))
            start += burst
            await settled()
            if look:
                await take()
        await take()
        feed.end()
        upstream_ended = True
        await settled()
        await take()
    check_plan(made, total, max_piece_blocks)
    for n, (size, at_end) in enumerate(zip(sizes(made), ends, strict=True)):
        least, most = piece_range(n, max_piece_blocks)
        assert at_end or size >= least * BLOCK
        assert size <= max(most * BLOCK, 2 * BLOCK - 1)


async def settled() -> None:
    """Lets everything that can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("look_ahead", [BLOCK, 6, 1])
async def test_first_piece_is_a_block_and_comes_with_the_code_that_ends_its_look_ahead(look_ahead: int) -> None:
    feed = Feed(codes(0, BLOCK + look_ahead - 1))
    async with contextlib.aclosing(session_of(feed.read(), look_ahead=look_ahead).jobs()) as jobs:
        first = asyncio.ensure_future(anext(jobs))
        await settled()
        assert not first.done()
        feed.give(codes(BLOCK + look_ahead - 1, BLOCK + look_ahead))
        job = await asyncio.wait_for(first, PATIENCE_S)
    assert (len(job.codes), start_of(job), job.look_ahead) == (BLOCK + look_ahead, 0, look_ahead)


async def test_pieces_grow_while_the_codes_come_one_by_one() -> None:
    feed, made = Feed(), []
    async with contextlib.aclosing(session_of(feed.read()).jobs()) as jobs:
        asked = asyncio.ensure_future(anext(jobs))
        for i in range(30 * BLOCK):
            feed.give(codes(i, i + 1))
            await settled()
            if asked.done():
                made.append(asked.result())
                asked = asyncio.ensure_future(anext(jobs))
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    assert [size // BLOCK for size in sizes(made)] == [1, 1, 1, 2, 4, 8, 8]


async def test_first_pieces_are_twice_as_planned_at_most_when_more_came_and_later_ones_take_it() -> None:
    feed = Feed(codes(0, 43 * BLOCK))
    async with contextlib.aclosing(session_of(feed.read()).jobs()) as jobs:
        made = [await anext(jobs) for _ in range(7)]
    assert sizes(made) == [b * BLOCK for b in (2, 2, 2, 4, 8, 16, 8)]


@pytest.mark.parametrize("came, blocks", [(BLOCK - 1, 1), (BLOCK, 2), (5 * BLOCK, 2)])
async def test_a_piece_grows_while_it_waits_and_the_next_one_follows_it(came: int, blocks: int) -> None:
    feed = Feed(codes(0, 2 * BLOCK))
    session = session_of(feed.read())
    async with contextlib.aclosing(session.jobs()) as jobs:
        first = await anext(jobs)
        assert told(session.latest()) == told(first)
        feed.give(codes(2 * BLOCK, 2 * BLOCK + came))
        await settled()
        grown = session.latest()
        assert (start_of(grown), sizes([grown]), grown.look_ahead) == (0, [blocks * BLOCK], BLOCK)
        feed.give(codes(2 * BLOCK + came, 9 * BLOCK))
        assert start_of(await anext(jobs)) == blocks * BLOCK


async def test_a_piece_that_waits_until_the_codes_have_ended_takes_the_rest() -> None:
    feed = Feed(codes(0, 2 * BLOCK))
    session = session_of(feed.read())
    async with contextlib.aclosing(session.jobs()) as jobs:
        await anext(jobs)
        feed.end()
        await settled()
        assert (len(session.latest().codes), session.latest().look_ahead) == (2 * BLOCK, 0)
        assert [job async for job in jobs] == []


async def test_a_piece_takes_what_came_while_the_one_before_was_made() -> None:
    feed = Feed(codes(0, 28 * BLOCK))
    async with contextlib.aclosing(session_of(feed.read()).jobs()) as jobs:
        for _ in range(6):
            before = await anext(jobs)
        assert (start_of(before), len(before.codes)) == (18 * BLOCK, 10 * BLOCK)
        feed.give(codes(28 * BLOCK, 39 * BLOCK + 5))
        await settled()
        after = await anext(jobs)
        assert (start_of(after), len(after.codes), after.look_ahead) == (27 * BLOCK, 12 * BLOCK, BLOCK)


async def test_a_remainder_above_the_largest_piece_is_split_into_whole_blocks() -> None:
    made = await pieces(at_once([codes(0, 5 * BLOCK + 1)]), max_piece_blocks=2)
    assert sizes(made) == [2 * BLOCK, 2 * BLOCK, BLOCK + 1]
    made = await pieces(at_once([codes(0, 2 * BLOCK + 1)]), max_piece_blocks=2)
    assert sizes(made) == [BLOCK, BLOCK + 1]


async def test_a_short_reply_is_one_piece_once_it_has_ended() -> None:
    (job,) = await pieces(at_once([codes(0, 5)]))
    assert (codes_of(job), start_of(job), job.look_ahead) == (list(range(5)), 0, 0)


async def test_streamed_codes_that_come_twice_are_dropped() -> None:
    again = [codes(0, 30), codes(0, 30), codes(20, 61), codes(60, 61)]
    check_plan(await pieces(at_once(again)), 61, 16)


# ----------------------------------------------- a request that is begun again


@given(st.integers(0, 700), st.integers(0, 700 * SAMPLES_PER_CODE), st.integers(2, 20))
async def test_a_little_before_what_was_delivered_is_made_in_large_pieces_that_nobody_hears(
    total: int, delivered: int, max_piece_blocks: int
) -> None:
    delivered = min(delivered, total * SAMPLES_PER_CODE)
    upstream = at_once([codes(0, total)])
    made = await pieces(upstream, max_piece_blocks=max_piece_blocks, delivered=delivered)
    border = delivered // (SAMPLES_PER_CODE * BLOCK) * BLOCK
    check_plan(made, total, max_piece_blocks, first=max(0, border - REPLAYED_BLOCKS * BLOCK))
    ends = [(start_of(job) + size) * SAMPLES_PER_CODE for job, size in zip(made, sizes(made), strict=True)]
    assert [job.is_heard for job in made] == [end > delivered for end in ends]
    before = [
        size for job, size in zip(made[:-2], sizes(made), strict=False) if start_of(job) < border
    ]  # the end is split
    assert all(size == max_piece_blocks * BLOCK for size in before[:-1])
    assert border in [start_of(job) for job in made] or border + 2 * BLOCK > total


async def test_behind_what_was_delivered_a_stream_begins() -> None:
    feed = Feed(codes(0, 22 * BLOCK))
    session = session_of(feed.read(), delivered=20 * BLOCK * SAMPLES_PER_CODE + 7)
    async with contextlib.aclosing(session.jobs()) as jobs:
        made = [await anext(jobs) for _ in range(2)]
        assert [
            (start_of(job) // BLOCK, size // BLOCK, job.is_heard) for size, job in zip(sizes(made), made, strict=True)
        ] == [
            (16, 4, False),
            (20, 1, True),
        ]
        asked = asyncio.ensure_future(anext(jobs))
        await settled()
        assert not asked.done()
        feed.give(codes(22 * BLOCK, 23 * BLOCK))
        assert start_of(await asked) == 21 * BLOCK


async def test_a_piece_that_was_delivered_does_not_grow_beyond_that() -> None:
    feed = Feed(codes(0, 4 * BLOCK))
    session = session_of(feed.read(), delivered=3 * BLOCK * SAMPLES_PER_CODE)
    async with contextlib.aclosing(session.jobs()) as jobs:
        first = await anext(jobs)
        feed.give(codes(4 * BLOCK, 9 * BLOCK))
        await settled()
        assert told(session.latest()) == told(first) and sizes([first]) == [3 * BLOCK]


async def test_a_whole_answer_is_one_job_whatever_was_delivered_of_it() -> None:
    (job,) = await pieces(at_once([codes(0, 1000)]), streams=False, delivered=12345)
    assert (len(job.codes), job.is_heard) == (1000, True)


# ------------------------------------------------------------- how it may end


class UpstreamBroke(Exception):
    pass


@pytest.mark.parametrize("streams", [False, True])
async def test_an_error_of_the_upstream_is_raised(streams: bool) -> None:
    feed = Feed(codes(0, 10))
    feed.fail(UpstreamBroke("gone"))
    with pytest.raises(UpstreamBroke, match="gone"):
        await asyncio.wait_for(pieces(feed.read(), streams=streams), PATIENCE_S)


async def test_an_error_while_a_piece_is_made_is_raised_when_the_next_is_asked_for() -> None:
    feed = Feed(codes(0, 24))
    async with contextlib.aclosing(session_of(feed.read()).jobs()) as jobs:
        await anext(jobs)
        feed.give(codes(24, 200))
        feed.fail(UpstreamBroke("gone"))
        await settled()
        with pytest.raises(UpstreamBroke):
            await anext(jobs)


class Watched:
    """An upstream that says whether somebody still reads it."""

    def __init__(self, *chunks: StageChunk) -> None:
        self._feed = Feed(*chunks)
        self.read_by = 0

    async def read(self) -> AsyncIterator[StageChunk]:
        self.read_by += 1
        try:
            async for chunk in self._feed.read():
                yield chunk
        finally:
            self.read_by -= 1


@pytest.mark.parametrize("streams", [False, True])
async def test_closing_the_jobs_ends_the_reader(streams: bool) -> None:
    upstream, before = Watched(codes(0, 24)), asyncio.all_tasks()
    jobs = session_of(upstream.read(), streams=streams).jobs()
    asked = asyncio.ensure_future(anext(jobs))
    await settled()
    assert upstream.read_by == 1
    if not asked.done():
        asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await jobs.aclose()
    assert upstream.read_by == 0 and not asyncio.all_tasks() - before


async def test_jobs_that_nobody_asked_for_read_nothing() -> None:
    upstream = Watched(codes(0, 24))
    await session_of(upstream.read()).jobs().aclose()
    assert upstream.read_by == 0


# --------------------------------------------------------------- the grid


def test_blocks_are_those_of_the_checkpoints_config(tiny: Path) -> None:
    config = read_config(tiny)
    assert CodeBlocks.from_config(config) == CodeBlocks(frames_per_code=2, codes_per_block=12, samples_per_frame=240)
    config["token2wav_config"]["dit_config"] |= {"block_size": 40, "repeats": 4}
    assert CodeBlocks.from_config(config) == CodeBlocks(frames_per_code=4, codes_per_block=10, samples_per_frame=240)


def test_a_config_that_leaves_the_blocks_out_means_those_of_transformers(tiny: Path) -> None:
    config = read_config(tiny)
    for key in ("block_size", "repeats"):
        del config["token2wav_config"]["dit_config"][key]
    del config["token2wav_config"]["bigvgan_config"]["upsample_rates"]
    assert CodeBlocks.from_config(config) == CodeBlocks(frames_per_code=2, codes_per_block=12, samples_per_frame=240)


def test_what_a_checkpoint_leaves_out_is_what_transformers_takes() -> None:
    of_transformers = Qwen2_5OmniToken2WavConfig()
    dit, vocoder = of_transformers.dit_config, of_transformers.bigvgan_config
    assert {name: getattr(dit, name) for name in DIT_DEFAULTS} == DIT_DEFAULTS
    assert {name: tuple(getattr(vocoder, name)) for name in VOCODER_DEFAULTS} == VOCODER_DEFAULTS
