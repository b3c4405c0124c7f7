"""How answers come from the pipeline: chunk by chunk, whole, and several at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from typing import Any, TypeVar

from omni_cluster.engine.answer import AnswerProgress
from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.fan_in import chain
from omni_cluster.engine.pipeline import Pipeline, answer_builder, answer_progress, filled
from omni_cluster.inputs import OmniRequest
from omni_cluster.outputs import OmniRequestOutput, StageChunk
from omni_cluster.server.door import Visit
from omni_cluster.server.metrics import HttpMeter, heard, recoveries_counted
from omni_cluster.server.quotas import Allowance

T = TypeVar("T")
P = TypeVar("P", bound=AnswerProgress)
_ENDED = object()
Begun = tuple[P, AsyncGenerator[StageChunk, None]]


async def begun(
    pipeline: Pipeline, request: OmniRequest, deadline: Deadline, meter: HttpMeter, allowance: Allowance, answer: P
) -> Begun[P]:
    """`answer` and the chunks that are added to it as they come, once the first is there.

    An error before that chunk gets an HTTP status of its own.
    """
    chunks = answer.following(heard(pipeline.stream(request, deadline), meter, allowance))
    return answer, chain(await anext(chunks), chunks)


async def whole_output(pipeline: Pipeline, request: OmniRequest, visit: Visit, meter: HttpMeter) -> OmniRequestOutput:
    """The whole answer; what it survived, and its sound, are counted."""
    events = recoveries_counted(pipeline.stream(request, visit.deadline), meter)
    output = await filled(answer_builder(request.request_id, pipeline.bound), events)
    visit.allowance.hear(output.audio)
    return output


async def all_begun(
    pipeline: Pipeline, requests: Sequence[OmniRequest], deadline: Deadline, meter: HttpMeter, allowance: Allowance
) -> list[Begun[AnswerProgress]]:
    """Several requests at once. If one fails, none goes on."""
    tasks = [
        asyncio.ensure_future(begun(pipeline, request, deadline, meter, allowance, answer_progress(pipeline.bound)))
        for request in requests
    ]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await _ended(tasks)
        for task in tasks:
            if not task.cancelled() and task.exception() is None:
                await task.result()[1].aclose()
        raise


async def gathered(works: Sequence[Awaitable[T]]) -> list[T]:
    """What all give; the first that fails, or the caller's end, ends all."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _ended(tasks)


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """What all say, as it comes. The first that fails ends all; closing this closes all."""
    async with contextlib.AsyncExitStack() as closing:
        if len(streams) == 1:  # without a task for each item
            async for item in await closing.enter_async_context(contextlib.aclosing(streams[0])):
                yield item
            return
        for stream in streams:
            await closing.enter_async_context(contextlib.aclosing(stream))
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


async def all_said(
    answers: Sequence[Begun[Any]], streams: Sequence[AsyncGenerator[T, None]]
) -> AsyncGenerator[T, None]:
    """What `streams`, one of each answer, say as it comes. Closing this closes the answers, silent ones too."""
    async with contextlib.AsyncExitStack() as closing:
        for _, chunks in answers:
            await closing.enter_async_context(contextlib.aclosing(chunks))
        async for item in await closing.enter_async_context(contextlib.aclosing(merged(streams))):
            yield item


def _next_of(stream: AsyncGenerator[T, None]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(anext(stream, _ENDED))


async def _ended(tasks: Iterable[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
