"""Rows that find no room in Ray's store end their own requests. Both ends, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import subprocess
import sys
import weakref
from collections.abc import AsyncGenerator
from typing import cast

import numpy as np
import pytest

from omni_cluster.cluster import row_objects
from omni_cluster.cluster.row_objects import RowsFuture, RowsItem, RowsPublisher, RowsPublishers, RowsReader
from omni_cluster.cluster.transport import RemoteStage
from omni_cluster.engine.memory_budget import MemoryBudget
from omni_cluster.types.errors import NO_ROOM, StoreFull

SMALL_BYTES = 100
LARGE_BYTES = 10_000
PATIENCE_S = 60


@pytest.fixture(autouse=True)
def short_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_objects, "DIRECT_BYTES", LARGE_BYTES - 1)


class Item:
    """Has a place in the store as long as anything refers to it."""


class Replica:
    """A producing replica whose streams need room in a store, called without Ray."""

    def __init__(self) -> None:
        self.budget = MemoryBudget()
        self.publishers = RowsPublishers(self.budget)
        self.stored_from_bytes = LARGE_BYTES
        """Items of so many bytes and more go through the store, which is full."""
        self.taking: list[asyncio.Task[None]] = []
        """Of each call, what takes its items for Serve, before Ray has stored the one before them."""
        self.lost: list[weakref.ref[Item]] = []
        """What Ray has of items without room, for its caller."""

    async def stream(
        self, method: str, name: str, first: int, *, replica_id: str, by_reference: bool
    ) -> AsyncGenerator[RowsItem, None]:
        assert method == "rows" and by_reference
        ahead: asyncio.Queue[RowsItem | None] = asyncio.Queue()
        self.taking.append(asyncio.create_task(self._take_ahead(name, first, ahead)))
        while (item := await ahead.get()) is not None:
            yield self._sent(item)

    async def _take_ahead(self, name: str, first: int, ahead: asyncio.Queue[RowsItem | None]) -> None:
        async with contextlib.aclosing(self.publishers.items(name, first)) as items:
            async for item in items:
                ahead.put_nowait(item)
        ahead.put_nowait(None)

    def _sent(self, item: RowsItem) -> RowsItem:
        """The item as Ray sends it."""
        if item.num_bytes >= self.stored_from_bytes:
            self._fail_with(Item())
        return cast(RowsItem, pickle.loads(pickle.dumps(item)))

    def _fail_with(self, item: Item) -> None:
        self.lost.append(weakref.ref(item))
        error = StoreFull(NO_ROOM)
        raise error  # which has this frame, which has the error and the item


@pytest.fixture
def replica() -> Replica:
    return Replica()


@pytest.fixture
async def reader(replica: Replica) -> RowsReader:
    def confirm(end: int) -> None:
        replica.publishers._open[reader.name].confirm(end)

    reader = RowsReader(cast(RemoteStage, replica), "replica", confirm)
    return reader


@pytest.fixture
async def publisher(replica: Replica, reader: RowsReader) -> RowsPublisher:
    return replica.publishers.open(reader.name, lambda: True)


def packed(num_bytes: int, value: int = 0) -> np.ndarray:
    return np.full(num_bytes, value, np.uint8)


async def came(rows: RowsFuture) -> np.ndarray:
    return await asyncio.wait_for(asyncio.shield(rows), PATIENCE_S)


async def is_lost(rows: RowsFuture) -> bool:
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
    assert not reader.is_broken and replica.budget.held_bytes == 0


async def test_nothing_keeps_an_item_without_room_until_garbage_is_searched_for(
    replica: Replica, reader: RowsReader, publisher: RowsPublisher, no_search_for_garbage: None
) -> None:
    assert await is_lost(reader.expect(publisher.publish(packed(LARGE_BYTES))))
    assert np.array_equal(await came(reader.expect(publisher.publish(packed(SMALL_BYTES)))), packed(SMALL_BYTES))
    assert [lost() for lost in replica.lost] == [None]


async def test_a_message_that_names_lost_rows_later_is_told_at_once(
    reader: RowsReader, publisher: RowsPublisher
) -> None:
    lost = publisher.publish(packed(LARGE_BYTES))
    reader.open()
    publisher.publish(packed(SMALL_BYTES, 1))
    after = publisher.publish(packed(SMALL_BYTES, 2))
    assert np.array_equal(await came(reader.expect(after)), packed(SMALL_BYTES, 2))
    assert await is_lost(reader.expect(lost))


async def test_rows_of_many_chunks_need_no_store(
    replica: Replica, reader: RowsReader, publisher: RowsPublisher
) -> None:
    expected = [reader.expect(publisher.publish(packed(LARGE_BYTES // 3, i))) for i in range(20)]
    for number, rows in enumerate(expected):
        assert np.array_equal(await came(rows), packed(LARGE_BYTES // 3, number))
    assert len(replica.taking) == 1 and replica.budget.held_bytes == 0 and not reader._half_met


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
    assert not reader.is_broken and replica.budget.held_bytes == 0 and not reader._half_met


async def test_a_call_of_which_an_item_found_no_room_ends(
    replica: Replica, reader: RowsReader, publisher: RowsPublisher
) -> None:
    assert await is_lost(reader.expect(publisher.publish(packed(LARGE_BYTES))))
    assert np.array_equal(await came(reader.expect(publisher.publish(packed(SMALL_BYTES, 4)))), packed(SMALL_BYTES, 4))
    first, following = replica.taking
    await asyncio.wait_for(first, PATIENCE_S)
    assert not following.done()


async def test_a_call_that_waits_ends_as_the_next_one_begins(publisher: RowsPublisher) -> None:
    items = publisher.items(0)
    publisher.publish(packed(SMALL_BYTES))
    assert len((await anext(items)).rows) == 1
    waiting = asyncio.create_task(anext(items))
    following = publisher.items(0)
    assert len((await anext(following)).rows) == 1  # not confirmed yet
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(waiting, PATIENCE_S)
    await following.aclose()


async def test_a_call_that_is_not_read_stays_open_until_its_rows_are_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_objects, "IDLE_S", 0.0)
    publisher = RowsPublisher(lambda: False, MemoryBudget())
    publisher.publish(packed(SMALL_BYTES))
    items = publisher.items(0)
    await anext(items)
    waiting = asyncio.create_task(anext(items))
    await asyncio.wait([waiting], timeout=0.1)
    assert not waiting.done()
    publisher.confirm(1)
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(waiting, PATIENCE_S)


@pytest.mark.parametrize(("confirmed", "ends_with"), [(1, asyncio.CancelledError), (2, StopAsyncIteration)])
async def test_a_call_whose_connection_closed_ends_alone_if_its_rows_are_confirmed(
    publisher: RowsPublisher, confirmed: int, ends_with: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_objects, "CANCELS_S", 0.0)
    for _ in range(2):
        publisher.publish(packed(SMALL_BYTES))
    items = publisher.items(0)
    assert len((await anext(items)).rows) == 2
    publisher.confirm(confirmed)
    publisher.close()
    with pytest.raises(ends_with):
        await anext(items)


def test_a_replica_takes_calls_before_ray_knows_that_its_consumers_node_is_dead() -> None:
    """See `tests/cluster/dead_consumer.py`."""
    command = (sys.executable, "-m", "tests.cluster.dead_consumer")
    said = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert said.returncode == 0, said.stderr[-2000:]
    assert "CancelledError" in said.stdout.splitlines()
