"""The consumer's end of a link: one stream from a replica, for all requests that are read from it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ray import ObjectRef

from omni_cluster.cluster.failures import named, named_failures
from omni_cluster.cluster.rows_reader import Rows, RowsReader
from omni_cluster.cluster.socket_line import SocketLine
from omni_cluster.cluster.transport import LinkItem, RemoteStage, Subscription, Ticket, WireChunk
from omni_cluster.errors import StageDied
from omni_cluster.outputs import StageChunk

T = TypeVar("T")


class Line(Protocol):
    """What a link's messages travel on; see `SocketLine`."""

    def messages(self, first: Subscription) -> AsyncGenerator[list[LinkItem], None]: ...

    async def subscribe(self, subscription: Subscription) -> bool: ...


MakeLine = Callable[[RemoteStage, str], Line]
"""Of a stage and the id of one of its replicas."""


class LinkEnded(StageDied):
    """A link ended under its readers; `Links` opens another one for those that come later."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What came for one reader. `rows`: where its rows come, if it has some that are Ray objects."""

    item: LinkItem
    rows: Rows | None = None


class Inbox:
    """What came for one reader and was not read yet; bounded by what the request makes, as its outbox is."""

    def __init__(self) -> None:
        self._items: deque[Arrival] = deque()
        self._came = asyncio.Event()

    def put(self, arrival: Arrival) -> None:
        self._items.append(arrival)
        self._came.set()

    async def take(self) -> Arrival:
        while not self._items:
            self._came.clear()
            await self._came.wait()
        return self._items.popleft()


class Link:
    """A stream of messages from one replica, open as long as somebody reads."""

    def __init__(self, line: Line, replica_id: str, first: Subscription, rows: RowsReader) -> None:
        self._line = line
        self.rows = rows
        self._replica_id = replica_id
        self._inboxes: dict[int, Inbox] = {}
        self._opened: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # In a context of its own: Serve ends the calls that a request made when that request ends, and the link is not
        # only its first reader's.
        self._receiver = asyncio.create_task(self._receive(first), context=contextvars.Context())
        rows.broke.add_done_callback(lambda _: self._receiver.cancel())

    @property
    def is_over(self) -> bool:
        return self._receiver.done() or self.rows.is_broken

    def open_inbox(self, reader: int) -> Inbox:
        inbox = self._inboxes[reader] = Inbox()
        return inbox

    def close_inbox(self, reader: int) -> None:
        self._inboxes.pop(reader, None)

    async def subscribe(self, subscription: Subscription) -> bool:
        """False when the link is over. Raises what the producer raised."""
        if not await asyncio.shield(self._opened):
            return False
        return await self._line.subscribe(subscription)

    async def _receive(self, first: Subscription) -> None:
        error: Exception = LinkEnded(f"the link to {self._replica_id} ended.")
        try:
            async with contextlib.aclosing(self._line.messages(first)) as messages:
                async for message in messages:
                    self._deliver(message)
        except Exception as raised:  # given to every reader, who raises it
            error = named(raised)
        finally:
            if self.rows.broke.done():
                error = self.rows.broke.result()
            self._settle(is_open=False)
            self.rows.close(error)
            for reader, inbox in self._inboxes.items():
                inbox.put(Arrival(LinkItem(reader, None, error)))

    def _deliver(self, message: list[LinkItem]) -> None:
        self._settle(is_open=True)
        batches = {item.body.rows_at[0] for item in message if item.body is not None and item.body.rows_at is not None}
        rows = {batch: self.rows.expect(batch) for batch in batches}
        for item in message:
            inbox = self._inboxes.get(item.reader)
            if inbox is not None:  # its reader may have left
                at = None if item.body is None else item.body.rows_at
                inbox.put(Arrival(item, None if at is None else rows[at[0]]))

    def _settle(self, *, is_open: bool) -> None:
        if not self._opened.done():
            self._opened.set_result(is_open)

    async def while_open(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work gives. LinkEnded when the link ends before: who does not send does not answer either."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, self._receiver], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise LinkEnded(f"the link to {self._replica_id} ended.")
            return task.result()
        finally:
            task.cancel()

    async def close(self) -> None:
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)


class Links:
    """All links of this replica, or of an ingress, to the replicas of one stage."""

    def __init__(
        self, source: RemoteStage, max_elements: int, make_line: MakeLine = SocketLine, *, inline: bool = False
    ) -> None:
        """`inline`: how rows come, see `Outlet`."""
        self._source = source
        self._inline = inline
        self._make_line = make_line
        self._max_elements = max_elements
        self._by_replica: dict[str, Link] = {}
        self._readers = itertools.count()

    async def read(self, ticket: Ticket, *, with_rows: bool) -> AsyncGenerator[StageChunk, None]:
        """All chunks of the request, from the first on.

        Raises what the producer raised, and StageDied when its replica is gone.
        """
        link, reader, inbox = await self._subscribed(ticket, with_rows=with_rows)
        try:
            while (arrival := await inbox.take()).item.body is not None:
                yield await self._opened(arrival.item.body, arrival.rows, link)
            if arrival.item.error is not None:
                raise arrival.item.error
        finally:
            link.close_inbox(reader)

    async def _opened(self, body: WireChunk, rows: Rows | None, link: Link) -> StageChunk:
        if rows is not None and body.rows_at is not None:
            packed = (await asyncio.shield(rows))[body.rows_at[1]]
            if isinstance(packed, ObjectRef):
                packed = await link.while_open(_read(packed))
            body = body.with_rows(packed)
        return body.open(self._max_elements)

    async def _subscribed(self, ticket: Ticket, *, with_rows: bool) -> tuple[Link, int, Inbox]:
        """A link to the replica, the number of this reader there, and its inbox."""
        reader = next(self._readers)
        while True:
            link = self._by_replica.get(ticket.replica_id)
            if link is None or link.is_over:
                link = self._opened_link(reader, ticket, with_rows=with_rows)
                return link, reader, link.open_inbox(reader)
            inbox = link.open_inbox(reader)
            if await self._is_taken(link, self._subscription(link.rows, reader, ticket, with_rows=with_rows)):
                return link, reader, inbox
            if self._by_replica.get(ticket.replica_id) is link:
                del self._by_replica[ticket.replica_id]  # it ended for what its first reader met

    def _opened_link(self, reader: int, ticket: Ticket, *, with_rows: bool) -> Link:
        self._forget_links_that_are_over()
        rows = RowsReader(self._source, ticket.replica_id)
        first = self._subscription(rows, reader, ticket, with_rows=with_rows)
        link = Link(self._make_line(self._source, ticket.replica_id), ticket.replica_id, first, rows)
        self._by_replica[ticket.replica_id] = link
        return link

    def _subscription(self, rows: RowsReader, reader: int, ticket: Ticket, *, with_rows: bool) -> Subscription:
        """Rows that are objects are called for at once; inline, only when some are too large for a message."""
        if with_rows and not self._inline:
            rows.open()
        return Subscription(reader, ticket.request_id, rows.name if with_rows else None)

    async def _is_taken(self, link: Link, subscription: Subscription) -> bool:
        try:
            taken = await link.subscribe(subscription)
        except BaseException:
            link.close_inbox(subscription.reader)
            raise
        if not taken:
            link.close_inbox(subscription.reader)
        return taken

    def _forget_links_that_are_over(self) -> None:
        self._by_replica = {replica: link for replica, link in self._by_replica.items() if not link.is_over}

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self._by_replica.values()))


async def _read(rows: ObjectRef) -> Any:
    """The object, mapped where it lies. Raises StageDied when its owner is gone."""
    with named_failures():
        return await rows
