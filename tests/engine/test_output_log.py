from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import numpy as np
import pytest
import torch

from omni_cluster.engine.output_log import (
    OutputLog,
    OutputLogFull,
    OutputLogs,
    OutputLogUnknown,
    chunk_bytes,
)
from omni_cluster.types.errors import PayloadError
from omni_cluster.types.outputs import MAX_IMAGE_BYTES, MAX_IMAGES, AudioChunk, ImageChunk, StageChunk
from omni_cluster.types.rows import LARGE_BYTES, Rows
from tests.rows import rows_of


def tokens(start: int, *ids: int) -> StageChunk:
    return StageChunk(token_start=start, token_ids=ids, text="".join(chr(97 + i) for i in ids))


def with_rows(start: int, count: int = 1) -> StageChunk:
    """A chunk of 16 bytes a row."""
    return StageChunk(rows=rows_of(start, torch.full((count, 4), float(start))))


def token_ids(chunks: list[StageChunk]) -> list[int]:
    return [t for chunk in chunks for t in chunk.token_ids]


async def all_of(reader: AsyncIterator[StageChunk]) -> list[StageChunk]:
    return [chunk async for chunk in reader]


@pytest.fixture
def log() -> OutputLog:
    return OutputLog("r", max_bytes=64)


async def test_every_reader_reads_everything_whenever_it_comes(log: OutputLog) -> None:
    early = asyncio.create_task(all_of(log.read()))
    log.put(tokens(0, 1))
    other = asyncio.create_task(all_of(log.read()))
    await asyncio.sleep(0)
    log.put(tokens(1, 2))
    log.close()
    late = await all_of(log.read())
    for chunks in (await early, await other, late):
        assert token_ids(chunks) == [1, 2]


async def test_reader_waits_for_what_is_not_there_yet(log: OutputLog) -> None:
    reader = log.read()
    item = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    assert not item.done()
    log.put(tokens(0, 1))
    assert (await item).token_ids == (1,)
    end = asyncio.ensure_future(anext(reader, None))
    await asyncio.sleep(0)
    assert not end.done()
    log.close()
    assert await end is None


async def test_one_item_says_all_that_was_put_since_the_last(log: OutputLog) -> None:
    reader = log.read()
    log.put(tokens(0, 1))
    assert (await anext(reader)).token_ids == (1,)
    log.put(tokens(1, 2))
    log.put(with_rows(0))
    log.put(StageChunk(3, (5, 6), rows=rows_of(1, torch.ones(2, 4)), finish_reason="stop"))
    joined = await anext(reader)
    assert (joined.token_start, joined.token_ids, joined.finish_reason) == (1, (2, 5, 6), "stop")
    assert joined.rows is not None and (joined.rows.start, joined.rows.end) == (0, 3)


async def test_a_slow_reader_makes_the_others_wait_for_nothing(log: OutputLog) -> None:
    slow, fast = log.read(), log.read()
    log.put(tokens(0, 1))
    await anext(slow)
    for number in range(1, 4):
        log.put(tokens(number, number))
        await anext(fast)
    assert (await anext(slow)).token_ids == (1, 2, 3)


@pytest.mark.parametrize("first", [0, 1, 2, 3])
async def test_reader_starts_at_the_chunk_it_asks_for(log: OutputLog, first: int) -> None:
    for number in range(3):
        log.put(tokens(number, number))
    log.close()
    assert token_ids(await all_of(log.read(first))) == list(range(first, 3))


async def test_rows_that_were_left_out_are_asked_of_the_log(log: OutputLog) -> None:
    async def earlier(first: int) -> AsyncGenerator[Rows, None]:
        for position in range(first, 3):
            yield rows_of(position, torch.full((1, 1), float(position)))

    rows = rows_of(3, torch.zeros(1, 1), earlier=earlier)
    log.put(StageChunk(rows=rows))
    log.put(StageChunk(rows=rows_of(4, torch.zeros(1, 1))))
    missing = [(part.start, part.tensor().tolist()) async for part in log.earlier_rows(1)]
    assert missing == [(1, [[1.0]]), (2, [[2.0]])]


async def test_rows_that_were_left_out_are_asked_of_the_engine_no_more_once_their_request_has_ended(
    log: OutputLog,
) -> None:
    asked = []

    async def earlier(first: int) -> AsyncGenerator[Rows, None]:
        for position in range(first, 3):
            asked.append(position)
            yield rows_of(position, torch.full((1, 1), float(position)))

    log.put(StageChunk(rows=rows_of(3, torch.zeros(1, 1), earlier=earlier)))
    parts = log.earlier_rows(0)
    assert (await anext(parts)).start == 0
    log.let_go()
    with pytest.raises(OutputLogUnknown, match="ended before its earlier hidden states were sent"):
        await anext(parts)
    assert asked == [0]


@pytest.mark.parametrize("rows", [None, rows_of(0, torch.zeros(1, 1))])
async def test_a_log_that_left_nothing_out_says_so(log: OutputLog, rows: Rows | None) -> None:
    log.put(StageChunk(rows=rows))
    with pytest.raises(OutputLogUnknown, match="left no hidden states out"):
        await anext(log.earlier_rows(0))


async def test_reader_may_start_at_a_chunk_that_comes_later(log: OutputLog) -> None:
    log.put(tokens(0, 0))
    read = asyncio.create_task(all_of(log.read(2)))
    await asyncio.sleep(0)
    log.put(tokens(1, 1))
    await asyncio.sleep(0)
    log.put(tokens(2, 2))
    log.close()
    assert token_ids(await read) == [2]


async def test_failure_comes_after_what_was_made(log: OutputLog) -> None:
    log.put(tokens(0, 1))
    log.fail(ValueError("broke"))
    reader = log.read()
    assert (await anext(reader)).token_ids == (1,)
    with pytest.raises(ValueError, match="broke"):
        await anext(reader)


async def test_failure_reaches_readers_that_wait_and_those_that_come_later(log: OutputLog) -> None:
    waiting = [asyncio.ensure_future(anext(log.read())) for _ in range(2)]
    await asyncio.sleep(0)
    log.fail(ValueError("broke"))
    results = await asyncio.gather(*waiting, anext(log.read()), return_exceptions=True)
    assert [type(result) for result in results] == [ValueError] * 3


async def test_closed_and_empty_log_gives_nothing(log: OutputLog) -> None:
    log.close()
    assert await all_of(log.read()) == []


async def test_closing_one_reader_leaves_the_others(log: OutputLog) -> None:
    gone, staying = log.read(), log.read()
    log.put(tokens(0, 1))
    await anext(gone)
    await gone.aclose()  # type: ignore[attr-defined]
    log.put(tokens(1, 2))
    log.close()
    assert token_ids(await all_of(staying)) == [1, 2]


async def test_what_waits_is_cut_between_chunks_and_says_what_follows_it(log: OutputLog) -> None:
    for start in range(3):
        log.put(with_rows(start))
    log.put(tokens(0, 1))

    def cut(max_item_bytes: int | None) -> list[tuple[int, int]]:
        following, items = 0, []
        while waiting := log.waiting(following, max_item_bytes):
            chunk, following = waiting
            items.append((following, chunk_bytes(chunk)))
        return items

    assert cut(32) == [(2, 32), (4, 16)]
    assert cut(8) == [(1, 16), (2, 16), (3, 16), (4, 0)]
    assert cut(None) == [(4, 48)]
    assert log.chunk(1).rows is not None


async def test_a_large_chunk_is_an_item_of_its_own() -> None:
    log = OutputLog("r", 4 * LARGE_BYTES)
    rows = rows_of(0, torch.zeros(LARGE_BYTES // 8, 2))
    for chunk in (tokens(0, 1), tokens(1, 2), StageChunk(rows=rows), tokens(2, 3), tokens(3, 4)):
        log.put(chunk)
    ends, following = [], 0
    while waiting := log.waiting(following, 4 * LARGE_BYTES):
        item, following = waiting
        ends.append(following)
        assert item.rows is None or item.rows is rows
    assert ends == [2, 3, 5]


async def test_a_listener_hears_of_every_chunk_and_of_the_end_until_it_leaves(log: OutputLog) -> None:
    heard: list[str] = []

    def first() -> None:
        heard.append("first")

    def second() -> None:
        heard.append("second")

    log.listen(first)
    log.listen(second)
    log.put(tokens(0, 1))
    log.unlisten(first)
    log.put(tokens(1, 2))
    log.fail(ValueError("broke"))
    assert heard == ["first", "second", "second", "second"]


async def test_bound_can_be_reached_exactly(log: OutputLog) -> None:
    log.put(with_rows(0, count=3))
    log.put(with_rows(3, count=1))
    log.close()
    (chunk,) = await all_of(log.read())
    assert chunk.rows is not None and chunk.rows.tensor().nbytes == 64


async def test_chunk_above_the_bound_is_refused_and_the_rest_kept(log: OutputLog) -> None:
    log.put(with_rows(0, count=4))
    with pytest.raises(OutputLogFull, match=r"r: .* 80 bytes, .*outbox_max_bytes = 64"):
        log.put(with_rows(4))
    log.put(tokens(0, 1))
    log.close()
    (chunk,) = await all_of(log.read())
    assert chunk.rows is not None and chunk.rows.end == 4 and chunk.token_ids == (1,)


def test_bytes_are_those_of_rows_and_sound() -> None:
    sound = AudioChunk(0, np.zeros(10, np.float32), 24_000)
    assert chunk_bytes(tokens(0, 1, 2)) == 0
    both = StageChunk(rows=rows_of(0, torch.zeros(2, 4, dtype=torch.bfloat16)), audio=sound)
    assert chunk_bytes(both) == 16 + 40 and chunk_bytes(both, with_rows=False) == 40


def test_pictures_count_toward_the_bound_and_are_joined(log: OutputLog) -> None:
    for number in range(2):
        log.put(StageChunk(images=(ImageChunk(number, bytes(32)),)))
    with pytest.raises(OutputLogFull, match="65 bytes"):
        log.put(StageChunk(images=(ImageChunk(2, b"1"),)))
    (joined, _) = log.waiting(0) or (None, 0)
    assert joined is not None and [image.number for image in joined.images] == [0, 1]


def test_a_chunk_is_cut_into_pictures_and_pieces_of_sound() -> None:
    images = tuple(ImageChunk(number, b"png") for number in range(3))
    whole = StageChunk(
        4, (1, 2), images=images, audio=AudioChunk(0, np.arange(5, dtype=np.float32), 8_000), finish_reason="stop"
    )
    parts = list(whole.cut(max_samples=2))
    assert [len(part.images) for part in parts] == [1, 1, 0, 0, 1]
    assert [part.audio.start if part.audio else None for part in parts] == [None, None, 0, 2, 4]
    joined = StageChunk.joined(parts)
    assert (joined.token_ids, joined.images, joined.finish_reason) == ((1, 2), images, "stop")
    assert not any(part.only_rows for part in parts)


@pytest.mark.parametrize(("number", "size"), [(0, MAX_IMAGE_BYTES + 1), (MAX_IMAGES, 1), (-1, 1)])
def test_pictures_have_bounds(number: int, size: int) -> None:
    with pytest.raises(PayloadError, match=f"picture {number} has {size} bytes; a request has at most"):
        ImageChunk(number, bytes(size))


def test_positions_count_toward_the_bound() -> None:
    rows = rows_of(0, torch.zeros(2, 4), torch.zeros(3, 2, dtype=torch.int64))
    assert chunk_bytes(StageChunk(rows=rows)) == 32 + 48


def test_logs_are_found_by_request_until_they_are_removed() -> None:
    logs = OutputLogs(max_bytes=16)
    opened = logs.open("a")
    assert logs.get("a") is opened and len(logs) == 1
    opened.put(with_rows(0))
    with pytest.raises(OutputLogFull):
        opened.put(with_rows(1))
    logs.remove("a")
    logs.remove("a")
    assert len(logs) == 0
    with pytest.raises(OutputLogUnknown, match="request a: no output log"):
        logs.get("a")


def test_request_that_never_came_is_unknown() -> None:
    with pytest.raises(OutputLogUnknown, match="request b"):
        OutputLogs(max_bytes=16).get("b")


@pytest.mark.parametrize("reads", ["read", "listen"])
async def test_a_log_that_is_read_is_given_up_only_when_its_reader_disappears(log: OutputLog, reads: str) -> None:
    given_up = asyncio.create_task(log.until_given_up(first_reader_s=0.01))
    reader = asyncio.create_task(all_of(log.read())) if reads == "read" else log.listen(lambda: None)
    await asyncio.wait({given_up}, timeout=0.1)  # ten times as long as it waits for a first reader
    assert not given_up.done()
    log.abandon()
    await asyncio.wait_for(given_up, 60)
    log.close()
    if reader is not None:
        await reader


async def test_a_log_that_nobody_comes_to_read_is_given_up(log: OutputLog) -> None:
    log.put(tokens(0, 1))
    log.close()
    await asyncio.wait_for(log.until_given_up(first_reader_s=0.01), 60)


def test_a_request_is_unfinished_until_its_last_chunk_or_its_end_and_counts_once() -> None:
    logs = OutputLogs(1 << 20)
    finished, failed, removed, at_work = (logs.open(name) for name in ("finished", "failed", "removed", "at work"))
    assert logs.unfinished == 4
    finished.put(StageChunk(0, (1,)))
    assert logs.unfinished == 4
    finished.put(StageChunk(1, (2,), finish_reason="stop"))
    assert logs.unfinished == 3
    finished.close()
    failed.fail(ValueError("it broke"))
    logs.remove("removed")
    assert removed.closed and logs.unfinished == 1
    for name in ("finished", "failed"):
        logs.remove(name)
    assert logs.unfinished == 1
    at_work.close()
    assert logs.unfinished == 0
