"""The consumer's end of a link: one stream from a replica, for all requests that are read from it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from omni_cluster.cluster.failures import named
from omni_cluster.cluster.line import Line
from omni_cluster.cluster.transport import BulkChunk, LinkItem, RemoteStage, Subscription, Ticket, WireChunk
from omni_cluster.errors import StageDied
from omni_cluster.outputs import StageChunk

T = TypeVar("T")
MakeLine = Callable[[RemoteStage, str], Line]
"""Of a stage and the id of one of its replicas."""


class LinkEnded(StageDied):
    """A link ended under its readers; `Links` opens another one for those that come later."""


class Inbox:
    """What came for one reader and was not read yet; bounded by what the request makes, as its outbox is."""

    def __init__(self) -> None:
        self._items: deque[LinkItem] = deque()
        self._came = asyncio.Event()

    def put(self, item: LinkItem) -> None:
        self._items.append(item)
        self._came.set()

    async def take(self) -> LinkItem:
        while not self._items:
            self._came.clear()
            await self._came.wait()
        return self._items.popleft()


class Link:
    """A stream of messages from one replica, open as long as somebody reads."""

    def __init__(self, line: Line, replica_id: str, first: Subscription) -> None:
        self._line = line
        self._replica_id = replica_id
        self._inboxes: dict[int, Inbox] = {}
        self._opened: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # In a context of its own: Serve ends the calls that a request made when that request ends, and the link is not
        # only its first reader's.
        self._receiver = asyncio.create_task(self._receive(first), context=contextvars.Context())

    @property
    def is_over(self) -> bool:
        return self._receiver.done()

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
            self._settle(is_open=False)
            for reader, inbox in self._inboxes.items():
                inbox.put(LinkItem(reader, None, error))

    def _deliver(self, message: list[LinkItem]) -> None:
        self._settle(is_open=True)
        for item in message:
            inbox = self._inboxes.get(item.reader)
            if inbox is not None:  # its reader may have left
                inbox.put(item)

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

    def __init__(self, source: RemoteStage, max_elements: int, make_line: MakeLine) -> None:
        self._source = source
        self._make_line = make_line
        self._max_elements = max_elements
        self._by_replica: dict[str, Link] = {}
        self._readers = itertools.count()

    async def read(self, ticket: Ticket, *, with_rows: bool) -> AsyncGenerator[StageChunk, None]:
        """All chunks of the request, from the first on.

        A chunk too large for a message (a long prompt's rows) is named in it and fetched as one Ray object of its own.
        Raises what the producer raised, and StageDied when its replica is gone.
        """
        subscription = Subscription(next(self._readers), ticket.request_id, with_rows)
        link, inbox = await self._subscribed(subscription, ticket.replica_id)
        try:
            while (item := await inbox.take()).body is not None:
                yield await self._opened(item, ticket, link)
            if item.error is not None:
                raise item.error
        finally:
            link.close_inbox(subscription.reader)

    async def _opened(self, item: LinkItem, ticket: Ticket, link: Link) -> StageChunk:
        body = item.body
        if isinstance(body, BulkChunk):
            body = await link.while_open(self._bulk(body.number, ticket))
        return body.open(self._max_elements)  # type: ignore[union-attr]

    async def _bulk(self, number: int, ticket: Ticket) -> WireChunk:
        found: WireChunk = await self._source.call(
            "chunk", ticket.request_id, number, replica_id=ticket.replica_id, wait_s=None
        )
        return found

    async def _subscribed(self, subscription: Subscription, replica_id: str) -> tuple[Link, Inbox]:
        while True:
            link = self._by_replica.get(replica_id)
            if link is None or link.is_over:
                self._forget_links_that_are_over()
                link = self._by_replica[replica_id] = Link(
                    self._make_line(self._source, replica_id), replica_id, subscription
                )
                return link, link.open_inbox(subscription.reader)
            inbox = link.open_inbox(subscription.reader)
            if await self._is_taken(link, subscription):
                return link, inbox
            if self._by_replica.get(replica_id) is link:
                del self._by_replica[replica_id]  # it ended for want of readers, or for what its first one met

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
