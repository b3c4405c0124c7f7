"""How codes of several codebooks become jobs: all at once, or piece by piece while more of them come."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_cluster.models.qwen3_omni.code2wav import FIRST_CODES, LATER_CODES, PASS_CODES, Code2WavSession, Reach
from omni_cluster.models.sound import SoundJob
from omni_cluster.types.codes import Codes
from omni_cluster.types.errors import TokenError
from omni_cluster.types.inputs import KnownOutput, OmniRequest
from omni_cluster.types.outputs import StageChunk
from tests.engine.stages import PATIENCE_S, Feed, at_once

REACH = Reach(samples_per_code=1920, missing_samples=555, context=10)
ALL = np.random.RandomState(0).randint(0, 256, (300, 4)).astype(np.int16)


def session_of(
    upstream: AsyncIterator[StageChunk], *, streams: bool = True, most: int = 64, delivered: int = 0
) -> Code2WavSession:
    known = {"code2wav": KnownOutput(num_samples=delivered)}
    request = OmniRequest("r", "", streams_audio=streams, known=known)
    return Code2WavSession(request, upstream, REACH, 256, 4, most)


def chunk(start: int, end: int) -> StageChunk:
    return StageChunk(codes=Codes.of(start, ALL[start:end]))


async def jobs_of(*chunks: StageChunk, **settings: Any) -> list[SoundJob]:
    return [job async for job in session_of(at_once(list(chunks)), **settings).jobs()]


def sizes(jobs: list[SoundJob]) -> list[int]:
    return [len(job.codes) for job in jobs]


async def settled() -> None:
    """Lets everything that can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_the_checkpoint_says_how_samples_lie(qwen3_folder: Path) -> None:
    assert Reach.from_config(json.loads((qwen3_folder / "config.json").read_text())) == REACH


async def test_all_codes_are_one_job_and_those_that_come_twice_are_dropped() -> None:
    (job,) = await jobs_of(chunk(0, 3), chunk(0, 3), chunk(2, 100), StageChunk(finish_reason="stop"), streams=False)
    np.testing.assert_array_equal(job.codes, ALL[:100])
    assert (job.samples, job.stream, job.voice, job.seed, job.is_heard) == (
        range(1920 * 100 - 555), None, None, None, True,
    )  # fmt: skip
    assert (job.parts, job.size) == (2, PASS_CODES + REACH.context)


@pytest.mark.parametrize("streams", [False, True])
async def test_without_codes_there_is_no_job(streams: bool) -> None:
    assert await jobs_of(StageChunk(finish_reason="stop"), streams=streams) == []


@pytest.mark.parametrize("most", [1, 7, 64])
async def test_pieces_follow_each_other_and_the_first_is_shorter(most: int) -> None:
    made = await jobs_of(chunk(0, 130), most=most)
    np.testing.assert_array_equal(np.concatenate([job.codes for job in made]), ALL[:130])
    assert max(sizes(made)) == most and set(sizes(made)[:-1]) <= {most}
    assert [made[0].samples.start, made[0].samples.stop, made[-1].samples.stop] == [0, 1920 * most - 555, 249_045]
    assert all(one.samples.stop == next_.samples.start for one, next_ in itertools.pairwise(made))
    assert [job.size - len(job.codes) for job in made] == [min(i * most, 10) for i in range(len(made))]
    assert all((job.stream, job.look_ahead, job.is_heard) == ("r", 0, True) for job in made)


async def test_pieces_grow_while_the_codes_come_one_by_one_and_the_end_gives_the_rest() -> None:
    feed, made = Feed(), []
    async with contextlib.aclosing(session_of(feed.read()).jobs()) as jobs:
        asked = asyncio.ensure_future(anext(jobs, None))
        for i in range(30):
            feed.give(chunk(i, i + 1))
            await settled()
            if asked.done() and (job := asked.result()) is not None:
                made.append(job)
                asked = asyncio.ensure_future(anext(jobs, None))
        feed.end()
        made.append(await asyncio.wait_for(asked, PATIENCE_S))
        assert await anext(jobs, None) is None
    assert sizes(made) == [*FIRST_CODES, LATER_CODES, LATER_CODES, 30 - sum(FIRST_CODES) - 2 * LATER_CODES]


async def test_a_piece_grows_while_it_waits_and_the_next_one_follows_it() -> None:
    feed = Feed(chunk(0, FIRST_CODES[0]))
    session = session_of(feed.read())
    async with contextlib.aclosing(session.jobs()) as jobs:
        assert len((await anext(jobs)).codes) == FIRST_CODES[0]
        feed.give(chunk(FIRST_CODES[0], 6))
        await settled()
        grown = session.latest()
        assert (len(grown.codes), grown.samples) == (6, range(1920 * 6 - 555))
        feed.give(chunk(6, 9))
        assert (await anext(jobs)).samples == range(1920 * 6 - 555, 1920 * 9 - 555)


async def test_a_request_that_is_begun_again_makes_all_and_is_silent_where_its_client_has_sound() -> None:
    made = await jobs_of(chunk(0, 40), most=16, delivered=1920 * 20 - 555)
    assert [(len(job.codes), job.is_heard) for job in made] == [(16, False), (16, True), (8, True)]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ([[1, 2, 256, 3]], "token 256 is no code of sound; codes are 0 to 255."),
        ([[1, 2, 3, -1]], "token -1 is no code of sound; codes are 0 to 255."),
        ([[1]], "codes are of 1 codebooks; there are 4."),
    ],
)
async def test_what_is_no_code_ends_its_request_in_one_sentence(bad: list[list[int]], told: str, streams: bool) -> None:
    with pytest.raises(TokenError) as error:
        await jobs_of(chunk(0, 5), StageChunk(codes=Codes.of(5, bad)), chunk(6, 40), streams=streams)
    assert str(error.value) == told
