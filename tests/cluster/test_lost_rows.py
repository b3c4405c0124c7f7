"""Rows that find no room in Ray's store end their own requests. Both ends, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncGenerator
from typing import cast

import numpy as np
import pytest
from ray.exceptions import OutOfDiskError, RayTaskError

from omni_cluster.cluster import rows_publisher
from omni_cluster.cluster.rows_publisher import RowsItem, RowsPublisher, RowsPublishers
from omni_cluster.cluster.rows_reader import Rows, RowsReader
from omni_cluster.cluster.transport import RemoteStage, or_store_full
from omni_cluster.engine.room import Room
from omni_cluster.errors import NO_ROOM, StoreFull

SMALL_BYTES = 100
LARGE_BYTES = 10_000
PATIENCE_S = 60


@pytest.fixture(autouse=True)
def short_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_publisher, "ITEM_BYTES", LARGE_BYTES)
    monkeypatch.setattr(rows_publisher, "SMALL_ITEM_BYTES", LARGE_BYTES - 1)


class Replica:
    """A producing replica whose streams need room in a store, called without Ray."""

    def __init__(self) -> None:
        self.room = Room()
        self.publishers = RowsPublishers(self.room)
        self.stored_from_bytes = LARGE_BYTES
        """Items of so many bytes and more go through the store, which is full."""
        self.is_full_here = True
        """Or in the store of who calls: the producer does not hear of it."""
        self.taking: list[asyncio.Task[None]] = []
        """Of each call, what takes its items for Serve, before Ray has stored the one before them."""

    async def stream(
        self, method: str, name: str, again: bool, *, replica_id: str, by_reference: bool
    ) -> AsyncGenerator[RowsItem | StoreFull, None]:
        assert method == "rows" and by_reference
        ahead: asyncio.Queue[RowsItem | None] = asyncio.Queue()
        self.taking.append(asyncio.create_task(self._take_ahead(name, again, ahead)))
        while (item := await ahead.get()) is not None:
            yield self._sent(item)

    async def _take_ahead(self, name: str, again: bool, ahead: asyncio.Queue[RowsItem | None]) -> None:
        async with contextlib.aclosing(self.publishers.items(name, again=again)) as items:
            async for item in items:
                ahead.put_nowait(item)
        ahead.put_nowait(None)

    def _sent(self, item: RowsItem) -> RowsItem | StoreFull:
        """The item as Ray sends it."""
        sent = cast(RowsItem, pickle.loads(pickle.dumps(item)))
        if sent.num_bytes < self.stored_from_bytes:
            return sent
        if self.is_full_here:
            raise StoreFull(NO_ROOM)
        return StoreFull(NO_ROOM)


@pytest.fixture(params=[True, False], ids=["producer's store", "consumer's store"])
def replica(request: pytest.FixtureRequest) -> Replica:
    replica = Replica()
    replica.is_full_here = request.param
    return replica


@pytest.fixture
async def reader(replica: Replica) -> RowsReader:
    return RowsReader(cast(RemoteStage, replica), "replica")


@pytest.fixture
async def publisher(replica: Replica, reader: RowsReader) -> RowsPublisher:
    return replica.publishers.open(reader.name, lambda: True)


def packed(num_bytes: int, value: int = 0) -> np.ndarray:
    return np.full(num_bytes, value, np.uint8)


async def came(rows: Rows) -> np.ndarray:
    return await asyncio.wait_for(asyncio.shield(rows), PATIENCE_S)


async def is_lost(rows: Rows) -> bool:
    with contextlib.suppress(StoreFull):
        await came(rows)
        return False
    return True


async def test_rows_without_room_end_alone_and_those_before_and_after_them_come(
    replica: Replica, reader: RowsReader, publisher: RowsPublisher
) -> None:
    sizes = [SMALL_BYTES, LARGE_BYTES, SMALL_BYTES, LARGE_BYTES, SMALL_BYTES]
    expected = [reader.expect(publisher.publish(packed(size, i))) for i, size in enumerate(sizes)]
    for number, (rows, size) in enumerate(zip(expected, sizes, strict=True)):
        if size == LARGE_BYTES:
            assert await is_lost(rows)
        else:
            assert np.array_equal(await came(rows), packed(size, number))
    assert not reader.is_broken and replica.room.held_bytes == 0


async def test_a_message_that_names_lost_rows_later_is_told_at_once(
    reader: RowsReader, publisher: RowsPublisher
) -> None:
    lost = publisher.publish(packed(LARGE_BYTES))
    reader.open()
    publisher.publish(packed(SMALL_BYTES, 1))
    after = publisher.publish(packed(SMALL_BYTES, 2))
    assert np.array_equal(await came(reader.expect(after)), packed(SMALL_BYTES, 2))
    assert await is_lost(reader.expect(lost))


async def test_rows_of_many_chunks_need_no_store_any_more_once_it_was_full(
    reader: RowsReader, publisher: RowsPublisher
) -> None:
    assert await is_lost(reader.expect(publisher.publish(packed(LARGE_BYTES))))
    expected = [reader.expect(publisher.publish(packed(LARGE_BYTES // 2, i))) for i in range(20)]
    for number, rows in enumerate(expected):
        assert np.array_equal(await came(rows), packed(LARGE_BYTES // 2, number))


async def test_rows_that_need_the_store_only_together_come_in_smaller_items(
    replica: Replica, reader: RowsReader, publisher: RowsPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_publisher, "ITEM_BYTES", 10 * LARGE_BYTES)
    expected = [reader.expect(publisher.publish(packed(LARGE_BYTES // 3, i))) for i in range(20)]
    for number, rows in enumerate(expected):
        assert np.array_equal(await came(rows), packed(LARGE_BYTES // 3, number))
    assert len(replica.taking) == 2 and replica.room.held_bytes == 0 and not reader._half_met


async def test_rows_that_need_a_store_by_themselves_are_an_item_of_their_own(publisher: RowsPublisher) -> None:
    for size in (SMALL_BYTES, LARGE_BYTES, SMALL_BYTES, SMALL_BYTES, LARGE_BYTES):
        publisher.publish(packed(size))
    async with contextlib.aclosing(publisher.items()) as items:
        assert [len((await anext(items)).rows) for _ in range(4)] == [1, 1, 2, 1]


async def test_a_store_that_even_small_items_need_is_not_asked_for_ever(
    replica: Replica, reader: RowsReader, publisher: RowsPublisher
) -> None:
    replica.stored_from_bytes = 1
    expected = [reader.expect(publisher.publish(packed(SMALL_BYTES))) for _ in range(5)]
    assert all([await is_lost(rows) for rows in expected]) and not reader.is_broken


async def test_a_store_with_room_again_takes_large_rows(
    replica: Replica, reader: RowsReader, publisher: RowsPublisher
) -> None:
    assert await is_lost(reader.expect(publisher.publish(packed(LARGE_BYTES))))
    replica.stored_from_bytes = 2 * LARGE_BYTES
    assert np.array_equal(await came(reader.expect(publisher.publish(packed(LARGE_BYTES, 3)))), packed(LARGE_BYTES, 3))


async def test_rows_that_were_taken_behind_those_without_room_come(
    replica: Replica, reader: RowsReader, publisher: RowsPublisher
) -> None:
    sizes = [LARGE_BYTES, SMALL_BYTES, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES - 1, SMALL_BYTES, SMALL_BYTES]
    expected = [reader.expect(publisher.publish(packed(size, i))) for i, size in enumerate(sizes)]
    assert [await is_lost(rows) for rows in expected] == [size == LARGE_BYTES for size in sizes]
    for number, (rows, size) in enumerate(zip(expected, sizes, strict=True)):
        if size < LARGE_BYTES:
            assert np.array_equal(rows.result(), packed(size, number))
    assert not reader.is_broken and replica.room.held_bytes == 0 and not reader._half_met


async def test_a_call_of_which_an_item_found_no_room_ends(
    replica: Replica, reader: RowsReader, publisher: RowsPublisher
) -> None:
    assert await is_lost(reader.expect(publisher.publish(packed(LARGE_BYTES))))
    assert np.array_equal(await came(reader.expect(publisher.publish(packed(SMALL_BYTES, 4)))), packed(SMALL_BYTES, 4))
    first, following = replica.taking
    await asyncio.wait_for(first, PATIENCE_S)
    assert not following.done()


async def test_a_call_that_waits_ends_as_the_next_one_begins(publisher: RowsPublisher) -> None:
    items = publisher.items()
    publisher.publish(packed(SMALL_BYTES))
    assert len((await anext(items)).rows) == 1
    waiting = asyncio.create_task(anext(items))
    following = publisher.items(again=True)
    assert (await anext(following)).rows == []
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(waiting, PATIENCE_S)
    await following.aclose()


async def test_rows_that_come_twice_are_taken_once(reader: RowsReader) -> None:
    rows = [reader.expect(number) for number in range(3)]
    for first, count in [(0, 2), (0, 0), (1, 2)]:
        reader._take(first, [packed(SMALL_BYTES, first + i) for i in range(count)])
    assert [each.result()[0] for each in rows] == [0, 1, 2] and not reader._half_met
    reader.close(StoreFull(NO_ROOM))


class Objects:
    """What a call of Ray's gives: `None` is an object that finds no room where it is read."""

    def __init__(self, *objects: int | None) -> None:
        self._objects = list(objects)

    def __aiter__(self) -> Objects:
        return self

    async def __anext__(self) -> int:
        if not self._objects:
            raise StopAsyncIteration
        made = self._objects.pop(0)
        if made is None:
            raise OutOfDiskError
        return made


async def test_objects_behind_one_without_room_come() -> None:
    got = [item async for item in or_store_full(Objects(1, None, None, 2, None))]
    assert [item for item in got if not isinstance(item, StoreFull)] == [1, 2] and len(got) == 5


async def test_a_producer_s_store_without_room_ends_the_call() -> None:
    async def broken() -> AsyncGenerator[int, None]:
        yield 1
        raise RayTaskError("rows", "", OutOfDiskError()).as_instanceof_cause()

    items = or_store_full(broken())
    assert await anext(items) == 1
    with pytest.raises(OutOfDiskError):
        await anext(items)


async def test_a_replica_of_which_not_even_an_empty_item_comes_is_broken(
    replica: Replica, reader: RowsReader, publisher: RowsPublisher
) -> None:
    replica.stored_from_bytes = 0
    assert await is_lost(reader.expect(publisher.publish(packed(SMALL_BYTES))))
    assert isinstance(await asyncio.wait_for(asyncio.shield(reader.broke), PATIENCE_S), StoreFull)
