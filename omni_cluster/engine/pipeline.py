"""The seam between the HTTP face and the stages: what one asks of the other, wherever the stages run."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Collection, Mapping
from typing import Protocol

from prometheus_client.registry import Collector

from omni_cluster.engine.answer import AnswerBuilder, AnswerProgress
from omni_cluster.engine.build import BoundPipeline
from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.fan_in import Observer, StageEvent
from omni_cluster.types.errors import OmniError
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import OmniRequestOutput


class StatusUnknown(OmniError):
    """It is unknown at the moment which replicas run."""


class Pipeline(Protocol):
    """All stages of a configuration. `AsyncOmniLLM` has them in this process, `ServePipeline` on a Ray cluster."""

    @property
    def bound(self) -> BoundPipeline:
        """The configuration, and the family with its voices and its prompts."""

    def check(self, request: OmniRequest) -> None:
        """Raises RequestError if a stage would refuse the request, before any has begun. May be called in a thread."""

    def stream(self, request: OmniRequest, deadline: Deadline) -> AsyncGenerator[StageEvent, None]:
        """Chunks of all stages that a request needs, as they are made; `check` let the request pass.

        Closing the iterator ends the request in every stage. Raises RequestError for what a stage refuses,
        StageDied, StoreFull, DeadlineExceeded, and what else broke in a stage.
        """

    @property
    def sleepers(self) -> Collection[str]:
        """Stages that may have no replica: a request that needs one wakes it."""

    async def replicas(self) -> Mapping[str, int]:
        """How many replicas answer, by stage name. Raises StatusUnknown."""

    async def metrics(self, own: Collector) -> bytes:
        """All that was counted, in Prometheus' text format; `own`: what its caller has counted itself."""


def answer_builder(request_id: str, bound: BoundPipeline) -> AnswerBuilder:
    """Of a whole answer to a request."""
    return AnswerBuilder(request_id, _final_types(bound), bound.family.audio_tokens)


def answer_progress(bound: BoundPipeline) -> AnswerProgress:
    """Of an answer that is streamed."""
    return AnswerProgress(_final_types(bound), bound.family.audio_tokens)


def _final_types(bound: BoundPipeline) -> dict[str, str | None]:
    return {stage.model_stage: stage.final_output_type for stage in bound.config.stages}


async def whole_answer(
    pipeline: Pipeline, request: OmniRequest, deadline: Deadline, observe: Observer = lambda _: None
) -> OmniRequestOutput:
    """Waits for the whole answer to a request; `observe` sees its events."""
    answer = answer_builder(request.request_id, pipeline.bound)
    async with contextlib.aclosing(pipeline.stream(request, deadline)) as events:
        async for event in events:
            observe(event)
            answer.add(event.stage, event.chunk)
    return answer.finish()
