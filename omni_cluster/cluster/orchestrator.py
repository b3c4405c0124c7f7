"""One request through the cluster: the ingress asks each stage, the stages pull from each other."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

from ray.serve.handle import DeploymentHandle

from omni_cluster.cluster.link import Links
from omni_cluster.cluster.socket_line import links_to
from omni_cluster.cluster.transport import RemoteStage, Ticket
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine.build import BoundPipeline
from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.fan_in import Emit, FanIn, StageEvent
from omni_cluster.inputs import OmniRequest


@dataclass(frozen=True, slots=True)
class StageAccess:
    """A stage as the ingress sees it: it starts requests there by `calls`, and reads what comes of them by `links`."""

    calls: RemoteStage
    links: Links


def stage_access(handle: DeploymentHandle, config: PipelineConfig) -> StageAccess:
    calls = RemoteStage(handle, config.handover.transport)
    return StageAccess(calls, links_to(calls, config.limits.max_payload_elements))


class Orchestrator:
    """Holds a request's state and never touches an embedding."""

    def __init__(self, bound: BoundPipeline, stages: Mapping[str, StageAccess]) -> None:
        self._bound = bound
        self._stages = stages

    async def stream(self, request: OmniRequest, deadline: Deadline) -> AsyncGenerator[StageEvent, None]:
        """Chunks of all stages that the request needs, as they are made; text does not wait for sound.

        Closing the iterator ends the request in every stage: their streams stay open until then, for their consumers.
        """
        self._bound.check(request)
        run = FanIn(deadline)
        tickets = {stage.stage_id: self._ticket(stage, request) for stage in self._bound.stages_for(request)}
        all_read = AllRead(len(tickets))
        for stage in self._bound.stages_for(request):
            run.add(functools.partial(self._follow, stage, request, tickets, all_read))
        async with contextlib.aclosing(run.events()) as events:
            async for event in events:
                yield event

    def _ticket(self, stage: StageConfig, request: OmniRequest) -> asyncio.Future[Ticket]:
        """Known at once where a replica is, so that all stages start together; else the stage's own answer says it."""
        ticket: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        replica_id = self._stages[stage.model_stage].calls.next_replica()
        if replica_id is not None:
            ticket.set_result(Ticket(request.request_id, replica_id))
        return ticket

    async def _follow(
        self,
        stage: StageConfig,
        request: OmniRequest,
        tickets: Mapping[int, asyncio.Future[Ticket]],
        all_read: AllRead,
        emit: Emit,
    ) -> None:
        """Starts the stage once its source has given a ticket, and hands on what it says until it has finished."""
        source = self._bound.source(stage)
        remote = self._stages[stage.model_stage]
        upstream = await asyncio.shield(tickets[source.stage_id]) if source else None
        ticket = tickets[stage.stage_id]
        replica_id = ticket.result().replica_id if ticket.done() else ""
        asked = request.without_media() if source else request
        async with contextlib.aclosing(remote.calls.stream("generate", asked, upstream, replica_id=replica_id)) as call:
            own = await anext(call)
            if not ticket.done():
                ticket.set_result(own)
            async with contextlib.aclosing(remote.links.read(own, with_rows=False)) as chunks:
                async for chunk in chunks:
                    await emit(StageEvent(stage.model_stage, chunk))
                    if chunk.finish_reason is not None:
                        break
            await all_read.wait()


class AllRead:
    """Lets the stages of a request end together: while one works, the others keep what it may need again."""

    def __init__(self, stages: int) -> None:
        self._left = stages
        self._none_left = asyncio.Event()

    async def wait(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._none_left.set()
        await self._none_left.wait()
