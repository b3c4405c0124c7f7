"""The consuming end of connections over TCP: one to a replica, for all requests that are read from it.

A call of Serve's takes milliseconds, whatever is in it, and each step makes tokens. A call gives the replica's address
and the secret that both ends prove to know: so only processes that can call replicas can read from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import itertools
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from omni_cluster.cluster.failures import lost_with, named
from omni_cluster.cluster.loads import BROKEN_COOLDOWN_S
from omni_cluster.cluster.producer import MAX_ITEM_BYTES, Address
from omni_cluster.cluster.row_objects import RowsFuture, RowsReader
from omni_cluster.cluster.transport import RemoteStage, Ticket
from omni_cluster.cluster.wire import (
    GREETING_S,
    Heartbeat,
    MessageItem,
    RowsConfirmed,
    Subscription,
    prove_secret,
    read_frame,
    unpacked,
    write_frame,
)
from omni_cluster.engine.memory_budget import MemoryBudget
from omni_cluster.engine.output_log import chunk_bytes
from omni_cluster.types.errors import StageDied
from omni_cluster.types.outputs import StageChunk, answering
from omni_cluster.types.rows import Rows

GREETINGS = 4
"""Attempts at a handshake: a replica that many connect to at once ends the oldest handshakes."""
AGAIN_S = 0.2
MAX_FRAME_BYTES = 64 << 20
"""What a reader accepts: the sound and pictures in a message, and all that is around it."""


class SocketClient:
    """The consuming end of one connection."""

    def __init__(self, source: RemoteStage, replica_id: str) -> None:
        self._source = source
        self._replica_id = replica_id
        self._writer: asyncio.StreamWriter | None = None

    async def messages(self, first: Subscription) -> AsyncGenerator[list[MessageItem], None]:
        """Opens the connection with its first reader; the first message is empty.

        Raises StageDied when it breaks, or nothing comes on it any more: whether or not it is read, this is the
        first that is known of a replica that is gone.
        """
        address: Address = await self._source.call("address", replica_id=self._replica_id)
        heartbeat = keeper = None
        try:
            reader, self._writer = await self._connected(address)
            heartbeat = Heartbeat(self._writer)
            keeper = asyncio.create_task(heartbeat.keep(self._write))
            self._write(first)
            while True:
                load, parts = await read_frame(reader, MAX_FRAME_BYTES, heartbeat.heard)
                self._source.loads.on_report(self._replica_id, load)
                if parts:
                    yield unpacked(parts)
        except (OSError, asyncio.IncompleteReadError) as error:
            self._source.loads.on_loss(self._replica_id, BROKEN_COOLDOWN_S)
            why = "nothing comes from it" if heartbeat is not None and heartbeat.is_lost else error
            raise StageDied(f"the connection to replica {self._replica_id} broke: {why}") from error
        finally:
            self._source.loads.on_disconnect(self._replica_id)
            writer, self._writer = self._writer, None
            if keeper is not None:
                keeper.cancel()
            if writer is not None:
                writer.close()

    async def _connected(self, address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Tries again if the replica ends the handshake: it keeps few at once. TimeoutError if it is not there."""
        for left in reversed(range(GREETINGS)):
            async with asyncio.timeout(GREETING_S):
                reader, writer = await asyncio.open_connection(address.host, address.port, limit=MAX_ITEM_BYTES)
            self._writer = writer
            try:
                await prove_secret(reader, writer, address.secret)
                break
            except (asyncio.IncompleteReadError, ConnectionResetError):
                writer.close()
                if not left:
                    raise
                await asyncio.sleep(random.uniform(0, AGAIN_S))
        return reader, writer

    async def subscribe(self, subscription: Subscription) -> bool:
        """Adds a reader once the connection is open; False when it has closed meanwhile."""
        if self._writer is None or self._writer.is_closing():
            return False
        self._write(subscription)
        try:
            await self._writer.drain()
        except ConnectionError:
            return False
        return True

    def confirm(self, rows_end: int) -> None:
        """Tells the replica that the rows of chunks before number `rows_end` are here, or are done without."""
        self._write(RowsConfirmed(rows_end))

    def _write(self, *said: Subscription | RowsConfirmed) -> None:
        """A beat has nothing to say. What closes is written to no more."""
        if self._writer is not None and not self._writer.is_closing():
            write_frame(self._writer, [msgspec.msgpack.encode(each) for each in said])


@dataclass(slots=True, eq=False)
class Arrival:
    """What came for one reader. `rows`: the future of its rows, if it has some."""

    item: MessageItem
    rows: RowsFuture | None = None
    num_bytes: int = 0
    is_unread: bool = True


class Inbox:
    """What came for one reader and was not read yet; bounded by what the request makes, as its log is."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._items: deque[Arrival] = deque()
        self._came = asyncio.Event()

    def put(self, arrival: Arrival) -> None:
        self._items.append(arrival)
        if (chunk := arrival.item.chunk) is not None:
            self._hold(arrival, chunk_bytes(chunk))
            if arrival.rows is not None:
                arrival.rows.add_done_callback(functools.partial(self._hold_rows, arrival))
        self._came.set()

    def _hold_rows(self, arrival: Arrival, rows: RowsFuture) -> None:
        if not rows.cancelled() and rows.exception() is None:
            self._hold(arrival, rows.result().nbytes)

    def _hold(self, arrival: Arrival, num_bytes: int) -> None:
        if arrival.is_unread:
            arrival.num_bytes += num_bytes
            self._budget.hold(num_bytes)

    async def take(self) -> Arrival:
        while not self._items:
            self._came.clear()
            await self._came.wait()
        return self._popped()

    def _popped(self) -> Arrival:
        arrival = self._items.popleft()
        arrival.is_unread = False
        self._budget.release(arrival.num_bytes)
        return arrival

    def close(self) -> None:
        while self._items:
            self._popped()


class ReplicaConnection:
    """A stream of messages from one replica, open as long as somebody reads."""

    def __init__(
        self, client: SocketClient, replica_id: str, first: Subscription, rows: RowsReader, budget: MemoryBudget
    ) -> None:
        self._client = client
        self._budget = budget
        self.rows = rows
        self._replica_id = replica_id
        self._inboxes: dict[int, Inbox] = {}
        self._opened: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # In a context of its own: Serve ends the calls that a request made when that request ends, and the connection
        # is not only its first reader's.
        self._receiver = asyncio.create_task(self._receive(first), context=contextvars.Context())
        rows.broke.add_done_callback(lambda _: self._receiver.cancel())

    @property
    def is_over(self) -> bool:
        return self._receiver.done() or self.rows.is_broken

    def open_inbox(self, reader: int) -> Inbox:
        inbox = self._inboxes[reader] = Inbox(self._budget)
        return inbox

    def close_inbox(self, reader: int) -> None:
        if (inbox := self._inboxes.pop(reader, None)) is not None:
            inbox.close()

    async def subscribe(self, subscription: Subscription) -> bool:
        """False when the connection is over. Raises what the producer raised."""
        if not await asyncio.shield(self._opened):
            return False
        return await self._client.subscribe(subscription)

    async def _receive(self, first: Subscription) -> None:
        error: Exception = StageDied(f"the connection to {self._replica_id} ended.")
        try:
            async with contextlib.aclosing(self._client.messages(first)) as messages:
                async for message in messages:
                    self._deliver(message)
                    del message  # an error in it has the frames it was raised in, and all rows in them
        except Exception as raised:  # given to every reader, which raises it
            error = named(raised)
        finally:
            if self.rows.broke.done():
                error = self.rows.broke.result()
            error = lost_with(error, self._replica_id)
            self._settle(is_open=False)
            self.rows.close(error)
            for reader, inbox in self._inboxes.items():
                inbox.put(Arrival(MessageItem(reader, None, error)))

    def _deliver(self, message: list[MessageItem]) -> None:
        self._settle(is_open=True)
        for item in message:
            rows = None if item.rows_at is None else self.rows.expect(item.rows_at)
            inbox = self._inboxes.get(item.reader)
            if inbox is not None:  # its reader may have left
                inbox.put(Arrival(item, rows))

    def _settle(self, *, is_open: bool) -> None:
        if not self._opened.done():
            self._opened.set_result(is_open)

    async def close(self) -> None:
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)


class ReplicaConnections:
    """All connections of this replica, or of an ingress, to the replicas of one stage."""

    def __init__(
        self,
        source: RemoteStage,
        max_elements: int,
        make_client: Callable[[RemoteStage, str], SocketClient] = SocketClient,
        budget: MemoryBudget | None = None,
    ) -> None:
        """`make_client`: of a replica, by its id; `budget`: where the inboxes are counted."""
        self._source = source
        self._budget = budget or MemoryBudget()
        self._make_client = make_client
        self._max_elements = max_elements
        self._by_replica: dict[str, ReplicaConnection] = {}
        self._readers = itertools.count()

    def read(self, ticket: Ticket, *, with_rows: bool) -> AsyncGenerator[StageChunk, None]:
        """All chunks of the request, from the first on.

        Raises what the producer raised, and StageDied when its replica is gone.
        """
        return self._chunks_with_rows(ticket) if with_rows else self._chunks(ticket, with_rows=False)

    async def _chunks_with_rows(self, ticket: Ticket) -> AsyncGenerator[StageChunk, None]:
        with contextlib.ExitStack() as inboxes:
            async with contextlib.aclosing(self._chunks(ticket, with_rows=True)) as chunks:
                async for chunk in chunks:
                    yield answering(chunk, functools.partial(self._earlier_rows, inboxes, ticket))

    async def end(self, ticket: Ticket) -> bool:
        """Tells the replica that the request has its whole answer. False where there is no connection to say it on."""
        connection = self._by_replica.get(ticket.replica_id)
        ends = Subscription(next(self._readers), ticket.request_id, None, ends=True)
        return connection is not None and not connection.is_over and await connection.subscribe(ends)

    async def _earlier_rows(
        self, inboxes: contextlib.ExitStack, ticket: Ticket, first: int
    ) -> AsyncGenerator[Rows, None]:
        """On the connection that is there: a replica that is to end takes no new calls, and finishes its requests."""
        earlier = self._chunks(ticket, with_rows=True, earlier_from=first, inboxes=inboxes)
        try:
            async with contextlib.aclosing(earlier) as chunks:
                async for chunk in chunks:
                    if chunk.rows is not None:
                        yield chunk.rows
        except StageDied as error:
            lost_with(error, ticket.replica_id)
            raise

    async def _chunks(
        self,
        ticket: Ticket,
        *,
        with_rows: bool,
        earlier_from: int | None = None,
        inboxes: contextlib.ExitStack | None = None,
    ) -> AsyncGenerator[StageChunk, None]:
        """`inboxes`: also closes that of these chunks, for a generator that is dropped."""
        connection, reader, inbox = await self._subscribed(ticket, with_rows=with_rows, earlier_from=earlier_from)
        if inboxes is not None:
            inboxes.callback(connection.close_inbox, reader)
        try:
            while (arrival := await inbox.take()).item.chunk is not None:
                yield await self._whole(arrival.item.chunk, arrival.rows)
            if arrival.item.error is not None:
                raise arrival.item.error
        finally:
            connection.close_inbox(reader)

    async def _whole(self, chunk: StageChunk, rows: RowsFuture | None) -> StageChunk:
        """The chunk with its rows. Raises PayloadError for rows that are not whole, or too many."""
        if rows is None:
            return chunk
        packed = await asyncio.shield(rows)
        return replace(chunk, rows=Rows.unpack(packed, max_elements=self._max_elements))

    async def _subscribed(
        self, ticket: Ticket, *, with_rows: bool, earlier_from: int | None
    ) -> tuple[ReplicaConnection, int, Inbox]:
        """A connection to the replica, the number of this reader there, and its inbox."""
        wish = Subscription(next(self._readers), ticket.request_id, None, earlier_from)
        while True:
            connection = self._by_replica.get(ticket.replica_id)
            if connection is None or connection.is_over:
                connection = self._opened_connection(wish, ticket.replica_id, with_rows=with_rows)
                return connection, wish.reader, connection.open_inbox(wish.reader)
            inbox = connection.open_inbox(wish.reader)
            if await self._is_taken(connection, self._subscription(connection.rows, wish, with_rows=with_rows)):
                return connection, wish.reader, inbox
            if self._by_replica.get(ticket.replica_id) is connection:
                del self._by_replica[ticket.replica_id]  # it ended because of its first reader's error

    def _opened_connection(self, wish: Subscription, replica_id: str, *, with_rows: bool) -> ReplicaConnection:
        self._by_replica = {name: each for name, each in self._by_replica.items() if not each.is_over}
        client = self._make_client(self._source, replica_id)
        rows = RowsReader(self._source, replica_id, client.confirm)
        first = self._subscription(rows, wish, with_rows=with_rows)
        connection = ReplicaConnection(client, replica_id, first, rows, self._budget)
        self._by_replica[replica_id] = connection
        return connection

    def _subscription(self, rows: RowsReader, wish: Subscription, *, with_rows: bool) -> Subscription:
        """Rows are called for at once."""
        if with_rows:
            rows.open()
        return replace(wish, rows=rows.name if with_rows else None)

    async def _is_taken(self, connection: ReplicaConnection, subscription: Subscription) -> bool:
        taken = False
        try:
            taken = await connection.subscribe(subscription)
        finally:
            if not taken:
                connection.close_inbox(subscription.reader)
        return taken

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._by_replica.values()))
