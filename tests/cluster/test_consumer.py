"""Both ends of a connection, in one process: what Ray carries between them is tested with the application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from omni_cluster.cluster import producer, row_objects
from omni_cluster.cluster.consumer import ReplicaConnections, SocketClient
from omni_cluster.cluster.failures import StageFailed
from omni_cluster.cluster.loads import Loads
from omni_cluster.cluster.producer import SocketServer
from omni_cluster.cluster.row_objects import RowsItem
from omni_cluster.cluster.transport import RemoteStage, Ticket
from omni_cluster.cluster.wire import MessageItem, Subscription
from omni_cluster.engine.memory_budget import MemoryBudget
from omni_cluster.engine.output_log import OutputLog, OutputLogs, OutputLogUnknown
from omni_cluster.types.errors import PayloadError, RequestError, RequestGone, StageDied
from omni_cluster.types.outputs import StageChunk
from omni_cluster.types.rows import HASH_BYTES, PrefixHashes, Rows
from tests.rows import rows_of

MAX_ITEM_BYTES = 256
ROW_BYTES = 16
UNSENT = "hidden states from position 1 on, which a request had left out, could not be sent"


class Replica:
    """A producing replica, called without Ray."""

    def __init__(self) -> None:
        self.logs = OutputLogs(1 << 20)
        self.sockets = SocketServer(self.logs, "127.0.0.1")
        self.loads = Loads()
        self.frozen = asyncio.Event()
        self.died = asyncio.Event()
        self.calls_for_rows = self.calls = 0
        self.sent: list[np.ndarray] = []
        self.items: list[RowsItem] = []
        self.chunks_of_items: list[int] = []

    @property
    def open_links(self) -> int:
        return len(self.sockets)

    @property
    def bytes_as_objects(self) -> int:
        return sum(packed.nbytes for packed in self.sent)

    async def stream(
        self, method: str, name: str, first: int, *, replica_id: str, by_reference: bool
    ) -> AsyncGenerator[RowsItem, None]:
        assert method == "rows" and by_reference
        self.calls_for_rows += 1
        self.calls += 1
        async with contextlib.aclosing(self.sockets.rows_publishers.items(name, first)) as items:
            async for item in items:
                if self.frozen.is_set():
                    await asyncio.Event().wait()
                if self.died.is_set():
                    raise ConnectionError("the replica died")
                self.sent += item.rows
                self.items.append(item)
                self.chunks_of_items.append(len(item.rows))
                yield item

    async def call(self, method: str, *, replica_id: str, wait_s: float | None = None) -> Any:
        assert method == "address"
        self.calls += 1
        return await self.sockets.address()


class Watched:
    """A client that remembers its messages, and that breaks when it is told to."""

    def __init__(self, client: SocketClient) -> None:
        self._client = client
        self.received: list[list[MessageItem]] = []
        self.broken = False

    async def messages(self, first: Subscription) -> AsyncGenerator[list[MessageItem], None]:
        async with contextlib.aclosing(self._client.messages(first)) as messages:
            async for message in messages:
                if self.broken:
                    raise ConnectionError("the replica died")
                self.received.append(message)
                yield message

    async def subscribe(self, subscription: Subscription) -> bool:
        return await self._client.subscribe(subscription)

    def confirm(self, rows_end: int) -> None:
        self._client.confirm(rows_end)


Clients = list[Watched]


@pytest.fixture
async def replica(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Replica]:
    monkeypatch.setattr(producer, "MAX_ITEM_BYTES", MAX_ITEM_BYTES)
    replica = Replica()
    yield replica
    await replica.sockets.close()


@pytest.fixture
def clients() -> list[Watched]:
    """Those that were made so far."""
    return []


@pytest.fixture
def budget() -> MemoryBudget:
    """The consumer's."""
    return MemoryBudget()


@pytest.fixture
async def connections(
    replica: Replica, clients: list[Watched], budget: MemoryBudget
) -> AsyncIterator[ReplicaConnections]:
    def make_client(source: RemoteStage, replica_id: str) -> Watched:
        clients.append(Watched(SocketClient(source, replica_id)))
        return clients[-1]

    connections = ReplicaConnections(cast(RemoteStage, replica), 1000, make_client, budget)
    yield connections
    await connections.close()


def rows(start: int, count: int = 1) -> StageChunk:
    values = torch.arange(start, start + count, dtype=torch.float32)[:, None].repeat(1, ROW_BYTES // 4)
    return StageChunk(start, tuple(range(start, start + count)), rows=rows_of(start, values))


def ticket(request_id: str) -> Ticket:
    return Ticket(request_id, "replica")


async def read(connections: ReplicaConnections, request_id: str, *, with_rows: bool = True) -> StageChunk:
    chunks = [chunk async for chunk in connections.read(ticket(request_id), with_rows=with_rows)]
    return StageChunk.joined(chunks)


async def settled() -> None:
    """All that can run without something new has run."""
    for _ in range(200):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def test_a_replica_is_told_that_an_answer_is_whole(replica: Replica, connections: ReplicaConnections) -> None:
    assert not await connections.end(ticket("r"))  # nothing was read from it yet
    log, other = replica.logs.open("r"), replica.logs.open("other")
    log.put(rows(0))
    log.close()
    await read(connections, "r")
    assert await connections.end(ticket("r")) and await connections.end(ticket("never came"))
    async with asyncio.timeout(60):
        await log.until_given_up(0.0)
    assert replica.logs.get("other") is other and not other._is_abandoned.is_set()


async def test_readers_of_many_requests_share_a_link_and_each_gets_its_own(
    replica: Replica, connections: ReplicaConnections, clients: Clients
) -> None:
    names = [f"r{i}" for i in range(8)]
    for number, name in enumerate(names):
        log = replica.logs.open(name)
        for token in range(5):
            log.put(rows(token, 1 + number % 2) if token == 0 else rows(token + number % 2))
        log.close()
    made = await asyncio.gather(*(read(connections, name) for name in names))
    for number, chunk in enumerate(made):
        assert list(chunk.token_ids) == list(range(5 + number % 2))
        assert chunk.rows is not None and chunk.rows.tensor()[:, 0].tolist() == list(chunk.token_ids)
    assert len(clients) == 1


async def messages_of_a_step(logs: list[OutputLog], clients: Clients) -> list[int]:
    """How many items each message has of a row that all of them make at once, once all of them are read."""
    await until(lambda: all(log._listeners for log in logs))
    await settled()
    received = clients[0].received
    before = len(received)
    for log in logs:
        log.put(rows(0))
    await until(lambda: sum(map(len, received[before:])) >= len(logs))
    await settled()
    return [len(message) for message in received[before:]]


async def test_what_one_step_makes_leaves_in_one_message(
    replica: Replica, connections: ReplicaConnections, clients: Clients
) -> None:
    names = [f"r{i}" for i in range(10)]
    logs = [replica.logs.open(name) for name in names]
    tasks = [asyncio.create_task(read(connections, name)) for name in names]
    assert await messages_of_a_step(logs, clients) == [10]
    for log in logs:
        log.close()
    await asyncio.gather(*tasks)


async def test_a_message_is_cut_at_its_limit(
    replica: Replica, connections: ReplicaConnections, clients: Clients
) -> None:
    logs = [replica.logs.open(f"r{i}") for i in range(40)]
    tasks = [asyncio.create_task(read(connections, f"r{i}")) for i in range(40)]
    assert await messages_of_a_step(logs, clients) == [16, 16, 8]
    for log in logs:
        log.close()
    await asyncio.gather(*tasks)


async def test_rows_are_objects_and_no_message_has_them(
    replica: Replica, connections: ReplicaConnections, clients: Clients
) -> None:
    log = replica.logs.open("long")
    log.put(rows(0, 100))
    log.put(rows(100))
    log.close()
    chunk = await read(connections, "long")
    assert chunk.rows is not None and chunk.rows.tensor()[:, 0].tolist() == list(range(101))
    made = [item for message in clients[0].received for item in message if item.chunk is not None]
    assert [item.rows_at for item in made] == [0, 1] and all(item.chunk.rows is None for item in made if item.chunk)
    assert replica.bytes_as_objects > 100 * ROW_BYTES and len(replica.sent) == 2 and replica.calls_for_rows == 1


async def test_rows_of_one_step_are_one_item(
    replica: Replica, connections: ReplicaConnections, clients: Clients
) -> None:
    logs = [replica.logs.open(f"r{i}") for i in range(4)]
    tasks = [asyncio.create_task(read(connections, f"r{i}")) for i in range(4)]
    await until(lambda: len(replica.sockets.rows_publishers) == 1 and all(log._listeners for log in logs))
    await settled()
    for log in logs:
        log.put(rows(0))
        log.close()
    made = await asyncio.gather(*tasks)
    assert [chunk.rows is not None and len(chunk.rows.raw) for chunk in made] == [1] * 4
    assert replica.chunks_of_items == [4]


async def test_a_reader_without_rows_gets_none_of_them(
    replica: Replica, connections: ReplicaConnections, clients: Clients
) -> None:
    log = replica.logs.open("r")
    log.put(rows(0, 100))
    log.close()
    chunk = await read(connections, "r", with_rows=False)
    assert chunk.rows is None and len(chunk.token_ids) == 100


async def test_two_readers_of_one_request_read_all_of_it(
    replica: Replica, connections: ReplicaConnections, clients: Clients
) -> None:
    log = replica.logs.open("r")
    log.put(rows(0))
    both = [asyncio.create_task(read(connections, "r", with_rows=with_rows)) for with_rows in (True, False)]
    await settled()
    log.put(rows(1))
    log.close()
    assert [chunk.token_ids for chunk in await asyncio.gather(*both)] == [(0, 1), (0, 1)]


async def test_a_reader_that_is_slow_holds_up_nobody_and_loses_nothing(
    replica: Replica, connections: ReplicaConnections, clients: Clients
) -> None:
    slow_log, log = replica.logs.open("slow"), replica.logs.open("fast")
    slow = connections.read(ticket("slow"), with_rows=True)
    slow_log.put(rows(0))
    first = await anext(slow)
    for token in range(20):
        log.put(rows(token))
        slow_log.put(rows(token + 1))
        await settled()
    log.close()
    slow_log.close()
    assert len((await read(connections, "fast")).token_ids) == 20
    rest = [chunk async for chunk in slow]
    assert list(StageChunk.joined([first, *rest]).token_ids) == list(range(21))


async def test_what_broke_a_request_reaches_its_reader_alone(
    replica: Replica, connections: ReplicaConnections, clients: Clients
) -> None:
    broken, failed, well = (replica.logs.open(name) for name in ("broken", "failed", "well"))
    tasks = [asyncio.create_task(read(connections, name)) for name in ("broken", "failed", "well")]
    await settled()
    broken.fail(RequestError("no such voice"))
    failed.fail(ZeroDivisionError("by zero"))
    well.put(rows(0))
    well.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], RequestError) and str(results[0]) == "no such voice"
    assert isinstance(results[1], StageFailed) and "ZeroDivisionError: by zero" in str(results[1])
    assert cast(StageChunk, results[2]).token_ids == (0,)


async def test_rows_with_a_gap_end_their_own_reader_alone(
    replica: Replica, connections: ReplicaConnections, clients: Clients
) -> None:
    broken, well = (replica.logs.open(name) for name in ("broken", "well"))
    for log, second in ((broken, 5), (well, 1)):
        log.put(rows(0))
        log.put(rows(second))
        log.close()
    results = await asyncio.gather(*(read(connections, name) for name in ("broken", "well")), return_exceptions=True)
    assert isinstance(results[0], PayloadError) and "gap" in str(results[0])
    assert cast(StageChunk, results[1]).token_ids == (0, 1)


async def test_a_request_that_does_not_come_is_refused_and_the_next_one_is_read(
    replica: Replica, connections: ReplicaConnections, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "PATIENCE_S", 0.0)
    with pytest.raises(OutputLogUnknown, match="nobody"):
        await read(connections, "nobody")
    log = replica.logs.open("r")
    reading = asyncio.create_task(read(connections, "r"))
    await settled()
    with pytest.raises(OutputLogUnknown, match="nobody"):
        await read(connections, "nobody")
    log.put(rows(0))
    log.close()
    assert (await reading).token_ids == (0,)


async def test_readers_may_be_there_before_their_requests(
    replica: Replica, connections: ReplicaConnections, clients: Clients
) -> None:
    reading = [asyncio.create_task(read(connections, name)) for name in ("first", "second")]
    await settled()
    for name in ("second", "first"):
        log = replica.logs.open(name)
        log.put(rows(0))
        log.close()
    assert [chunk.token_ids for chunk in await asyncio.gather(*reading)] == [(0,), (0,)]
    assert len(clients) == 1


async def test_a_request_that_ends_early_ends_its_reader(
    replica: Replica, connections: ReplicaConnections, clients: Clients
) -> None:
    replica.logs.open("r").put(rows(0))
    chunks = connections.read(ticket("r"), with_rows=True)
    await anext(chunks)
    replica.logs.remove("r")
    with pytest.raises(OutputLogUnknown, match="ended before"):
        await anext(chunks)


async def test_every_reader_learns_that_the_replica_died_and_a_new_link_serves_the_next(
    replica: Replica, connections: ReplicaConnections, clients: Clients
) -> None:
    logs = [replica.logs.open(f"r{i}") for i in range(3)]
    tasks = [asyncio.create_task(read(connections, f"r{i}")) for i in range(3)]
    await until(lambda: all(log._listeners for log in logs))
    await settled()
    clients[0].broken = True
    logs[0].put(rows(0))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [StageDied] * 3
    logs[1].put(rows(0))
    logs[1].close()
    assert (await read(connections, "r1")).token_ids == (0,)
    assert len(clients) == 2


async def test_rows_that_do_not_come_end_with_their_connection(
    replica: Replica, connections: ReplicaConnections, clients: Clients
) -> None:
    replica.frozen.set()
    replica.logs.open("long").put(rows(0, 100))
    reading = asyncio.create_task(read(connections, "long"))
    await until(lambda: bool(clients and len(clients[0].received) > 1))
    await settled()
    assert not reading.done()
    await connections.close()
    with pytest.raises(StageDied):
        await reading


async def test_rows_whose_call_breaks_end_their_readers_and_a_new_link_serves_the_next(
    replica: Replica, connections: ReplicaConnections, clients: Clients
) -> None:
    replica.logs.open("beside")
    beside = asyncio.create_task(read(connections, "beside"))
    await settled()
    replica.died.set()
    replica.logs.open("r").put(rows(0))
    for reading in (read(connections, "r"), beside):
        with pytest.raises(StageDied, match="the replica died"):
            await reading
    await until(lambda: replica.open_links == 0)
    replica.died.clear()
    log = replica.logs.open("s")
    log.put(rows(0))
    log.close()
    assert (await read(connections, "s")).rows is not None
    assert len(clients) == 2


async def test_a_call_for_rows_that_nobody_reads_ends_and_the_next_reader_makes_another(
    replica: Replica, connections: ReplicaConnections, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_objects, "IDLE_S", 0.0)
    before = 0
    for _ in range(2):
        log = replica.logs.open("r")
        log.put(rows(0))
        log.close()
        assert (await read(connections, "r")).rows is not None
        call = connections._by_replica["replica"].rows._call
        await until(lambda: call is not None and call.done())  # noqa: B023
        assert replica.calls_for_rows > before and len(clients) == 1
        before = replica.calls_for_rows


async def test_rows_are_copied_out_of_their_item_which_is_let_go_at_once(
    replica: Replica, connections: ReplicaConnections, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray keeps an item in its store as long as anything here has one of its arrays."""
    monkeypatch.setattr(row_objects, "LARGE_BYTES", 10 * ROW_BYTES)
    log = replica.logs.open("r")
    chunks = connections.read(ticket("r"), with_rows=True)
    for start, count in ((0, 1), (1, 100)):
        log.put(rows(start, count))
        chunk = await anext(chunks)
        assert chunk.rows is not None and chunk.rows.tensor()[:, 0].tolist() == list(range(start, start + count))
        replica.sent[-1][:] = 0
        assert chunk.rows.tensor()[:, 0].tolist() == list(range(start, start + count))
    assert [item.rows for item in replica.items] == [[], []]
    await chunks.aclose()


def numbers_of(item: RowsItem) -> list[int]:
    return list(range(item.first, item.first + len(item.rows)))


async def test_small_rows_that_wait_are_one_item_and_are_kept_until_they_are_confirmed() -> None:
    publisher = row_objects.RowsPublisher(is_read=lambda: True, budget=(budget := MemoryBudget()))
    most = row_objects.DIRECT_BYTES
    sizes = (1, most + 1, 1, most - 1, 1, 1)
    for num_bytes in sizes:
        publisher.publish(np.zeros(num_bytes, np.uint8))
    async with contextlib.aclosing(publisher.items(0)) as items:
        assert [numbers_of(await anext(items)) for _ in range(4)] == [[0], [1], [2, 3], [4, 5]]
    assert budget.held_bytes == sum(sizes)
    publisher.confirm(2)
    assert budget.held_bytes == sum(sizes[2:])
    async with contextlib.aclosing(publisher.items(3)) as items:
        assert [numbers_of(await anext(items)) for _ in range(2)] == [[3, 4], [5]]
    publisher.confirm(99)
    publisher.publish(np.zeros(7, np.uint8))
    assert budget.held_bytes == 7
    publisher.close()
    assert budget.held_bytes == 0


async def test_nothing_is_kept_of_rows_whose_reader_has_left(
    replica: Replica, connections: ReplicaConnections, clients: Clients
) -> None:
    log = replica.logs.open("gone")
    log.put(rows(0))
    chunks = connections.read(ticket("gone"), with_rows=True)
    await anext(chunks)
    await chunks.aclose()
    log.put(rows(1))
    await until(lambda: len(replica.sent) == 2)
    await settled()
    await until(lambda: not connections._by_replica["replica"].rows._half_met)


async def test_a_reader_that_leaves_keeps_nothing_and_disturbs_nobody(
    replica: Replica, connections: ReplicaConnections, clients: Clients
) -> None:
    replica.logs.open("gone").put(rows(0))
    stays = replica.logs.open("stays")
    chunks = connections.read(ticket("gone"), with_rows=True)
    await anext(chunks)
    await chunks.aclose()
    reading = asyncio.create_task(read(connections, "stays"))
    await settled()
    replica.logs.get("gone").put(rows(1))
    stays.put(rows(0))
    stays.close()
    assert (await reading).token_ids == (0,)


@pytest.mark.parametrize("leaves", [False, True], ids=["reads all", "leaves"])
async def test_what_was_received_and_not_read_counts_as_held(
    replica: Replica, connections: ReplicaConnections, budget: MemoryBudget, leaves: bool
) -> None:
    log = replica.logs.open("r")
    log.put(rows(0))
    chunks = connections.read(ticket("r"), with_rows=True)
    await anext(chunks)
    assert budget.held_bytes == 0
    await until(lambda: replica.logs.budget.held_bytes == ROW_BYTES)
    log.put(rows(1, 4))
    packed_bytes = 5 * ROW_BYTES
    assert replica.logs.budget.held_bytes == packed_bytes
    await until(lambda: budget.held_bytes >= 4 * ROW_BYTES)
    await until(lambda: replica.logs.budget.held_bytes == packed_bytes)
    if leaves:
        await chunks.aclose()
    else:
        log.close()
        assert [chunk.token_ids async for chunk in chunks] == [(1, 2, 3, 4)]
    assert budget.held_bytes == 0
    replica.logs.remove("r")
    assert replica.logs.budget.held_bytes == 0


class Earlier:
    """Gives rows 0 to 3 one by one, the last ones when they are let out; then breaks, if it is to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.is_out, self._error = asyncio.Event(), error

    async def __call__(self, first: int) -> AsyncGenerator[Rows, None]:
        for position in range(first, 4):
            if position == 2:
                await self.is_out.wait()
            yield cast(Rows, rows(position).rows)
        if self._error is not None:
            raise self._error


async def confirmed_bytes(replica: Replica) -> int:
    """What the replica holds once the consumer has confirmed the rows that it has."""
    (publisher,) = replica.sockets.rows_publishers._open.values()
    await until(lambda: not publisher._kept)
    return replica.logs.budget.held_bytes


Chunks = AsyncGenerator[StageChunk, None]
Parts = AsyncGenerator[Rows, None]


async def asking(replica: Replica, connections: ReplicaConnections, earlier: Earlier) -> tuple[Chunks, Parts]:
    """A reader of a request that has the first chunk, and asks for rows that it left out, from the second one on."""
    first = rows(4).rows
    assert first is not None
    names = PrefixHashes(1, tuple(bytes([i]) * HASH_BYTES for i in range(4)))
    left_out = rows_of(4, first.tensor(), torch.zeros(3, 5, dtype=torch.int64), prefix=names, earlier=earlier)
    replica.logs.open("r").put(StageChunk(rows=left_out))
    chunks = connections.read(ticket("r"), with_rows=True)
    got = (await anext(chunks)).rows
    assert got is not None and got.start == 4 and got.earlier is not None
    return chunks, got.earlier(1)


async def test_rows_that_were_left_out_come_on_the_connection_that_is_there(
    replica: Replica, connections: ReplicaConnections, clients: Clients, budget: MemoryBudget
) -> None:
    """A replica that is to end takes no new calls."""
    earlier = Earlier()
    chunks, parts = await asking(replica, connections, earlier)
    calls, held_bytes = replica.calls, await confirmed_bytes(replica)
    assert (await anext(parts)).tensor()[:, 0].tolist() == [1.0]
    await until(lambda: replica.logs.budget.held_bytes == held_bytes + ROW_BYTES)
    earlier.is_out.set()
    assert [part.tensor()[:, 0].tolist() async for part in parts] in ([[2.0], [3.0]], [[2.0, 3.0]])
    assert replica.calls == calls and len(clients) == 1 and replica.sockets.rows_sent_bytes["asked"] == 3 * ROW_BYTES
    await until(lambda: replica.logs.budget.held_bytes == held_bytes)
    assert budget.held_bytes == 0
    await chunks.aclose()


@pytest.mark.parametrize(
    ("broke", "told", "lost"),
    [
        (RequestGone("gone"), RequestGone, ""),
        (StageDied("died"), StageDied, "replica"),
        (OSError("?"), StageFailed, None),
    ],
    ids=["gone", "died", "other"],
)
async def test_what_breaks_rows_that_were_left_out_reaches_who_asked_for_them(
    replica: Replica,
    connections: ReplicaConnections,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    broke: Exception,
    told: type[Exception],
    lost: str | None,
) -> None:
    """What is none of our errors is in the log of the replica where it broke too."""
    monkeypatch.setattr(logging.getLogger("ray.serve"), "propagate", True)
    earlier = Earlier(broke)
    chunks, parts = await asking(replica, connections, earlier)
    held_bytes = await confirmed_bytes(replica)
    earlier.is_out.set()
    with pytest.raises(told) as raised:
        _ = [part async for part in parts]
    assert getattr(raised.value, "replica_id", None) == lost
    logged = {record.getMessage() for record in caplog.records if record.exc_info}  # by several handlers
    assert logged == ({UNSENT} if told is StageFailed else set())
    await chunks.aclose()
    await until(lambda: replica.logs.budget.held_bytes == held_bytes)


@pytest.mark.parametrize("leaves", ["who asked", "the request's reader", "the consumer"])
async def test_rows_that_were_left_out_are_let_go_of_when_nobody_waits_for_them(
    replica: Replica, connections: ReplicaConnections, budget: MemoryBudget, leaves: str
) -> None:
    earlier = Earlier()
    chunks, parts = await asking(replica, connections, earlier)
    held_bytes = await confirmed_bytes(replica)
    await anext(parts)
    earlier.is_out.set()
    if leaves == "the consumer":
        await connections.close()
    else:
        await until(lambda: budget.held_bytes > 0)
        await (parts if leaves == "who asked" else chunks).aclose()
    await until(lambda: replica.logs.budget.held_bytes == held_bytes)
    assert budget.held_bytes == 0
    await chunks.aclose()


async def test_closing_ends_the_stream_at_both_ends(
    replica: Replica, connections: ReplicaConnections, clients: Clients
) -> None:
    replica.logs.open("r")
    reading = asyncio.create_task(read(connections, "r"))
    await settled()
    await connections.close()
    while replica.open_links:
        await asyncio.sleep(0)
    with pytest.raises(StageDied):
        await reading


async def test_a_fault_of_ours_that_ends_a_connection_is_logged(
    replica: Replica, connections: ReplicaConnections, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replica.logs.open("r")
    reading = asyncio.create_task(read(connections, "r"))
    await settled()
    monkeypatch.setattr(producer, "packed", lambda _: 1 / 0)
    replica.logs.get("r").put(StageChunk(0, (1,)))
    with pytest.raises(StageDied):
        await reading
    await until(lambda: "a connection ended, and its readers with it" in caplog.text)
