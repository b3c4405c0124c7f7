"""How answers come from the pipeline: chunk by chunk, whole, and several at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from omni_cluster.engine.answer import AnswerProgress
from omni_cluster.engine.fan_in import Observer, StageEvent
from omni_cluster.engine.pipeline import Pipeline, answer_progress, whole_answer
from omni_cluster.server.admission import AdmittedRequest
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import OmniRequestOutput, StageChunk

T = TypeVar("T")
P = TypeVar("P", bound=AnswerProgress)
_ENDED = object()


class AnswerStream(Generic[P]):
    """The chunks of an answer as they come; `progress` adds each, and then the observers see its event."""

    def __init__(self, events: AsyncGenerator[StageEvent, None], progress: P, *observers: Observer) -> None:
        self.progress = progress
        self._events = events
        self._observers = observers
        self._first: StageChunk | None = None

    async def begin(self) -> None:
        """Waits for the first chunk: an error before it gets an HTTP status of its own, and ends the request."""
        try:
            self._first = await anext(self)
        except BaseException:
            await self.aclose()
            raise

    def __aiter__(self) -> AsyncIterator[StageChunk]:
        return self

    async def __anext__(self) -> StageChunk:
        if (first := self._first) is not None:
            self._first = None
            return first
        event = await anext(self._events)
        self.progress.add(event.stage, event.chunk)
        for observe in self._observers:
            observe(event)
        return event.chunk

    async def aclose(self) -> None:
        """Ends the request in every stage."""
        await self._events.aclose()


async def open_stream(
    pipeline: Pipeline, request: OmniRequest, admitted: AdmittedRequest, progress: P
) -> AnswerStream[P]:
    """The answer to a request, once its first chunk is there."""
    events = pipeline.stream(request, admitted.deadline)
    stream = AnswerStream(events, progress, admitted.meter.observe, admitted.allowance.observe)
    await stream.begin()
    return stream


async def open_streams(
    pipeline: Pipeline, requests: Sequence[OmniRequest], admitted: AdmittedRequest
) -> list[AnswerStream[AnswerProgress]]:
    """Several requests at once. If one fails, none goes on."""
    tasks = [
        asyncio.ensure_future(open_stream(pipeline, request, admitted, answer_progress(pipeline.bound)))
        for request in requests
    ]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await _ended(tasks)
        for task in tasks:
            if not task.cancelled() and task.exception() is None:
                await task.result().aclose()
        raise


async def whole_output(pipeline: Pipeline, request: OmniRequest, admitted: AdmittedRequest) -> OmniRequestOutput:
    """The whole answer; what it survived, and its sound, are counted."""
    output = await whole_answer(pipeline, request, admitted.deadline, admitted.meter.observe_recovery)
    admitted.allowance.count_sound(output.audio)
    return output


async def gathered(works: Sequence[Awaitable[T]]) -> list[T]:
    """What all give; the first that fails, or the caller's end, ends all."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _ended(tasks)


def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """What all say, as it comes. The first that fails ends all; closing this closes all."""
    return streams[0] if len(streams) == 1 else _interleaved(streams)


async def _interleaved(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    async with closing_all(streams):
        waiting = {_next_of(stream): stream for stream in streams}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if (item := task.result()) is not _ENDED:
                        yield item
                        waiting[_next_of(waiting[task])] = waiting[task]
                    del waiting[task]
        finally:
            await _ended(waiting)


class Closes(Protocol):
    """What is closed when it is read no more."""

    async def aclose(self) -> None: ...


@contextlib.asynccontextmanager
async def closing_all(streams: Iterable[Closes]) -> AsyncIterator[None]:
    """Closes all, those that nothing was read of too."""
    async with contextlib.AsyncExitStack() as closing:
        for stream in streams:
            await closing.enter_async_context(contextlib.aclosing(stream))
        yield


def _next_of(stream: AsyncGenerator[T, None]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(anext(stream, _ENDED))


async def _ended(tasks: Iterable[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
