"""Conditioning rows of many requests on their way into one engine, soon and in few messages."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from omni_cluster.types.errors import PayloadError
from omni_cluster.types.inputs import RowsPush

GATHERING_S = 0.001
"""Rows of one step of the source come within about this time, and leave as one message: an engine's loop is busy with
steps."""
MAX_MESSAGES = 16
"""Under way at once. The engine answers once a step; to wait for each answer would cost a row a step or two."""
MAX_PUSHES = 32
"""Under way at once of one request."""

Sent = asyncio.Future[None]
Refusals = Sequence[str | None]
"""Of the pushes of one message, each in its place: what was wrong with it, None for one that was taken."""


class RowsPusher:
    """Sends what it is given in the order of its coming; `send` says what the engine refused.

    Messages are sent by a task of their own, so that a caller that leaves takes no other's rows along. Bounded by
    `MAX_PUSHES` a request, as long as its rows go through a `PushWindow`.
    """

    def __init__(self, send: Callable[[list[RowsPush]], Awaitable[Refusals]]) -> None:
        self._send = send
        self._waiting: list[tuple[RowsPush, Sent]] = []
        self._places = asyncio.Semaphore(MAX_MESSAGES)
        self._sender: asyncio.Task[None] | None = None
        self._messages: set[asyncio.Task[None]] = set()

    def put(self, push: RowsPush) -> Sent:
        """Returns a future: done when the engine has the rows, or its error; PayloadError for rows that it refused."""
        arrived: Sent = asyncio.get_running_loop().create_future()
        self._waiting.append((push, arrived))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all())
        return arrived

    async def _send_all(self) -> None:
        while self._waiting:
            await asyncio.sleep(GATHERING_S)
            await self._places.acquire()
            batch, self._waiting = self._waiting, []
            # Tasks begin in the order in which they are made, and a message is on its way once its task has begun.
            message = asyncio.create_task(self._send_one(batch))
            self._messages.add(message)
            message.add_done_callback(self._messages.discard)

    async def _send_one(self, batch: list[tuple[RowsPush, Sent]]) -> None:
        errors = await self._errors_of_sending([push for push, _ in batch])
        self._places.release()
        for (_, arrived), error in zip(batch, errors, strict=True):
            _settle(arrived, error)

    async def _errors_of_sending(self, pushes: list[RowsPush]) -> list[Exception | None]:
        try:
            refusals = await self._send(pushes)
            return [None if refusal is None else PayloadError(refusal) for refusal in refusals]
        except Exception as error:  # given to every caller whose rows were in the message
            return [error] * len(pushes)


class PushWindow:
    """The pushes of one request: `push` waits only when too many are under way, and raises what an earlier one met."""

    def __init__(self, pusher: RowsPusher) -> None:
        self._pusher = pusher
        self._under_way: deque[Sent] = deque()

    async def push(self, push: RowsPush) -> None:
        while self._under_way and (self._under_way[0].done() or len(self._under_way) >= MAX_PUSHES):
            await self._under_way.popleft()
        self._under_way.append(self._pusher.put(push))

    async def all_arrived(self) -> None:
        while self._under_way:
            await self._under_way.popleft()


def _settle(arrived: Sent, error: Exception | None) -> None:
    if arrived.done():  # its caller has left
        return
    if error is None:
        arrived.set_result(None)
    else:
        arrived.set_exception(error)
