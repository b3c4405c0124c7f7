"""Rows of many requests on their way into one engine, in as few messages as the engine can take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from omni_cluster.inputs import RowsPush


class RowsPusher:
    """While one message is under way, what comes meanwhile waits and leaves as one.

    Bounded without a queue of its own: a caller of `push` waits until its rows have arrived, so each request has at
    most one push waiting. Messages are sent by a task of their own, so that a caller who leaves takes nobody's rows
    along.
    """

    def __init__(self, send: Callable[[list[RowsPush]], Awaitable[None]]) -> None:
        self._send = send
        self._waiting: list[tuple[RowsPush, asyncio.Future[None]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def push(self, push: RowsPush) -> None:
        """Returns when the engine has the rows; raises what the engine raised."""
        arrived = asyncio.get_running_loop().create_future()
        self._waiting.append((push, arrived))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all())
        await arrived

    async def _send_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            error = await self._error_of_sending([push for push, _ in batch])
            for _, arrived in batch:
                _settle(arrived, error)

    async def _error_of_sending(self, pushes: list[RowsPush]) -> Exception | None:
        try:
            await self._send(pushes)
        except Exception as error:  # given to every caller whose rows were in the message
            return error
        return None


def _settle(arrived: asyncio.Future[None], error: Exception | None) -> None:
    if arrived.done():  # its caller has left
        return
    if error is None:
        arrived.set_result(None)
    else:
        arrived.set_exception(error)
