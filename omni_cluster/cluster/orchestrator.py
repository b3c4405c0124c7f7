"""One request through the cluster: the ingress asks each stage, the stages pull from each other."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ray.serve.handle import DeploymentHandle

from omni_cluster.cluster.failures import named_failures
from omni_cluster.cluster.parcel import Posted
from omni_cluster.cluster.replica_connection import ReplicaConnections
from omni_cluster.cluster.transport import ANSWER_S, RemoteStage, ReplicaLost, Ticket
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine.build import BoundPipeline
from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.fan_in import Emit, FanIn, StageEvent
from omni_cluster.inputs import OmniRequest


@dataclass(frozen=True, slots=True)
class StageAccess:
    """A stage as the ingress sees it: it starts requests by `calls`, and reads what comes of them by `connections`."""

    calls: RemoteStage
    connections: ReplicaConnections


def stage_access(handle: DeploymentHandle, config: PipelineConfig) -> StageAccess:
    calls = RemoteStage(handle)
    return StageAccess(calls, ReplicaConnections(calls, config.limits.max_payload_elements))


class Orchestrator:
    """Holds a request's state and never touches an embedding."""

    def __init__(self, bound: BoundPipeline, stages: Mapping[str, StageAccess]) -> None:
        self._bound = bound
        self._stages = stages

    async def stream(self, posted: Posted, deadline: Deadline) -> AsyncGenerator[StageEvent, None]:
        """Chunks of all stages that the request needs, as they are made; text does not wait for sound.

        Closing the iterator ends the request in every stage: their streams stay open until then, for their consumers.
        Raises StageDied when a replica is gone, and TooManyVoices.
        """
        request = posted.request
        stages = self._bound.stages_for(request)
        with self._chosen_replicas(stages, request.conversation) as chosen:
            await self._admit(request, chosen)
            run = FanIn(deadline)
            tickets = {stage.stage_id: _ticket(request, chosen[stage.stage_id]) for stage in stages}
            all_read = AllRead(len(tickets))
            for stage in stages:
                run.add(functools.partial(self._follow, stage, posted, tickets, all_read))
                if posted.has_media and self._bound.source(stage) is None:
                    run.add(functools.partial(self._bring_media, stage, posted))
            async with contextlib.aclosing(run.events()) as events:
                with named_failures():
                    async for event in events:
                        yield event

    @contextlib.contextmanager
    def _chosen_replicas(self, stages: Sequence[StageConfig], conversation: bytes) -> Iterator[dict[int, str | None]]:
        """A replica of each stage, which counts as busy with the request as long as the context is open.

        Earlier turns are in the prefix caches of the entry stage alone: the others share none.
        """
        calls = {stage.stage_id: self._stages[stage.model_stage].calls for stage in stages}
        entries = {stage.stage_id for stage in stages if self._bound.source(stage) is None}
        chosen = {
            stage_id: remote.choose_replica(conversation if stage_id in entries else b"")
            for stage_id, remote in calls.items()
        }
        try:
            yield chosen
        finally:
            for stage_id, replica_id in chosen.items():
                if replica_id is not None:
                    calls[stage_id].loads.ended(replica_id)

    async def _admit(self, request: OmniRequest, chosen: Mapping[int, str | None]) -> None:
        """Before any stage begins. As long as no replica is known here, there is none to ask."""
        stage = self._bound.admitting_stage(request)
        replica_id = None if stage is None else chosen[stage.stage_id]
        if stage is None or replica_id is None:
            return
        calls, wait_s = self._stages[stage.model_stage].calls, ANSWER_S + (self._bound.config.limits.max_stall_s or 0)
        if not await calls.call("admit", request.request_id, replica_id=replica_id, wait_s=wait_s):
            raise self._bound.too_many_voices()

    async def _follow(
        self,
        stage: StageConfig,
        posted: Posted,
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
        has_media = source is None and posted.has_media
        started = remote.calls.stream("generate", posted.request, upstream, has_media, replica_id=replica_id)
        async with contextlib.aclosing(started) as call:
            own = await _first(call, replica_id)
            if not ticket.done():
                ticket.set_result(own)
            if has_media:
                posted.taken(own)
            async with contextlib.aclosing(remote.connections.read(own, with_rows=False)) as chunks:
                async for chunk in chunks:
                    await emit(StageEvent(stage.model_stage, chunk))
                    if chunk.finish_reason is not None:
                        break
            await all_read.wait()

    async def _bring_media(self, stage: StageConfig, posted: Posted, emit: Emit) -> None:
        """Beside the reading of what the stage makes, which notices when the replica is gone."""
        await posted.bring_media(self._stages[stage.model_stage].calls)


def _ticket(request: OmniRequest, replica_id: str | None) -> asyncio.Future[Ticket]:
    """Known at once if a replica was chosen, so that all stages start together; else the stage's answer gives it."""
    ticket: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
    if replica_id is not None:
        ticket.set_result(Ticket(request.request_id, replica_id))
    return ticket


async def _first(call: AsyncGenerator[Ticket, None], replica_id: str) -> Ticket:
    """The stage's ticket. ReplicaLost when a replica that runs, as far as is known, gives none in time."""
    try:
        async with asyncio.timeout(ANSWER_S if replica_id else None):
            return await anext(call)
    except (TimeoutError, StopAsyncIteration):
        raise ReplicaLost(f"replica {replica_id} did not take the request.") from None


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
