"""Rows of many requests on their way into one engine, in as few messages as the engine can take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from omni_cluster.inputs import RowsPush


class RowsPusher:
    """While one message is under way, what comes meanwhile waits and leaves as one.

    Bounded without a queue of its own: a caller of `push` waits until its rows have arrived, so each request has at
    most one push waiting.
    """

    def __init__(self, send: Callable[[list[RowsPush]], Awaitable[None]]) -> None:
        self._send = send
        self._waiting: list[tuple[RowsPush, asyncio.Future[None]]] = []
        self._sending = asyncio.Lock()

    async def push(self, push: RowsPush) -> None:
        """Returns when the engine has the rows; raises what the engine raised."""
        arrived = asyncio.get_running_loop().create_future()
        self._waiting.append((push, arrived))
        async with self._sending:
            if not arrived.done():
                await self._send_waiting()
        await arrived

    async def _send_waiting(self) -> None:
        batch, self._waiting = self._waiting, []
        try:
            await self._send([push for push, _ in batch])
        except BaseException as error:
            for _, arrived in batch:
                _settle(arrived, error)
            raise
        for _, arrived in batch:
            _settle(arrived, None)


def _settle(arrived: asyncio.Future[None], error: BaseException | None) -> None:
    if arrived.done():
        return
    if error is None:
        arrived.set_result(None)
        return
    arrived.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
    arrived.exception()  # its waiter may be the caller that raises the same error by itself
