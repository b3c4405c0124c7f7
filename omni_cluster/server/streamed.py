"""The beginning of every streamed answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from omni_cluster.engine.answer import Answer
from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.fan_in import chain
from omni_cluster.engine.pipeline import Pipeline, answer_to
from omni_cluster.inputs import OmniRequest
from omni_cluster.outputs import StageChunk
from omni_cluster.server.metrics import HttpMeter, heard
from omni_cluster.server.quotas import Allowance


async def begun(
    pipeline: Pipeline, request: OmniRequest, deadline: Deadline, meter: HttpMeter, allowance: Allowance
) -> tuple[Answer, AsyncGenerator[StageChunk, None]]:
    """The answer and the chunks that it is made of, once the first is there.

    An error before that chunk gets an HTTP status of its own.
    """
    answer = answer_to(request.request_id, pipeline.bound)
    chunks = answer.following(heard(pipeline.stream(request, deadline), meter, allowance))
    return answer, chain(await anext(chunks), chunks)
