"""The chunks of one request's stages, which work at the same time, as one stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from omni_cluster.engine.deadline import Deadline
from omni_cluster.types.outputs import StageChunk

MAX_WAITING_EVENTS = 1024
"""If a reader lags by more chunks than this, the stages of its request wait for it."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """A request that went on although replicas of these `stages` were lost, `stall_s` after the first was noticed."""

    stages: tuple[str, ...]
    stall_s: float


@dataclass(frozen=True, slots=True)
class StageEvent:
    """A chunk, and the stage that made it. `recovery`: of the first chunk since the request was begun again."""

    stage: str
    chunk: StageChunk
    recovery: Recovery | None = None


Emit = Callable[[StageEvent], Awaitable[None]]
Observer = Callable[[StageEvent], None]
Producer = Callable[[Emit], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Ended:
    error: Exception | None


class FanIn:
    """Runs producers as tasks; the first that fails, or the deadline, ends all of them."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._is_late = False
        self._alarm = asyncio.get_running_loop().call_later(deadline.left_s, self._expire)
        deadline.listen(self._expire)
        self._events: asyncio.Queue[StageEvent | _Ended] = asyncio.Queue(MAX_WAITING_EVENTS)
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, producer: Producer) -> None:
        self._tasks.append(asyncio.create_task(self._produce(producer)))

    async def _produce(self, producer: Producer) -> None:
        error = None
        try:
            await producer(self._put)
        except Exception as raised:  # handed to the reader, which raises it
            error = raised
        await self._events.put(_Ended(error))

    async def _put(self, event: StageEvent) -> None:
        if not event.chunk.only_rows:
            await self._events.put(event)

    async def events(self) -> AsyncGenerator[StageEvent, None]:
        """All events that say something, in the order they came. Raises what a producer raised, or DeadlineExceeded.

        However it ends, closed early included, no producer is left running.
        """
        left = len(self._tasks)
        try:
            while left:
                event = await self._next()
                if isinstance(event, StageEvent):
                    yield event
                    continue
                left -= 1
                if event.error is not None:
                    raise event.error
        finally:
            await self._stop()

    async def _next(self) -> StageEvent | _Ended:
        event = await self._events.get()
        if self._is_late:
            raise self._deadline.exceeded()
        return event

    def _expire(self) -> None:
        self._is_late = True
        with contextlib.suppress(asyncio.QueueFull):  # then the reader has something to wake for
            self._events.put_nowait(_Ended(None))

    async def _stop(self) -> None:
        self._alarm.cancel()
        self._deadline.unlisten(self._expire)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()  # their exceptions hold frames, and these hold what the tasks worked on and this object
