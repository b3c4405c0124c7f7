"""One replica of one stage: its engine, and the outboxes that its consumers pull from."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from typing import Any

from ray.serve.handle import DeploymentHandle

from omni_cluster.cluster.autoscaling import LOAD, engine_load
from omni_cluster.cluster.transport import BulkChunk, RemoteStage, Ticket, WireChunk, own_replica_id
from omni_cluster.cluster.upstream import pull
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine.build import bind, make_stage
from omni_cluster.engine.handover import Handover, stamped
from omni_cluster.engine.memory import fit_replica
from omni_cluster.engine.outbox import Outbox, Outboxes, chunk_bytes
from omni_cluster.inputs import OmniRequest
from omni_cluster.outputs import StageChunk


class StageReplica:
    """Runs a stage's engine in this Serve replica.

    For each request `generate` gives the ingress first a ticket, then the stage's chunks without rows, and then stays
    open until the ingress ends it: as long as it is open, the request's outbox can be read, from the start if need be.
    """

    async def __init__(  # type: ignore[misc]
        self, stage_id: int, config: PipelineConfig, source: DeploymentHandle | None = None
    ) -> None:
        """Serve awaits this: a replica takes requests once its engine is up."""
        self._bound = await asyncio.to_thread(fit_replica, bind(config), stage_id)
        self._stage: StageConfig = next(s for s in self._bound.config.stages if s.stage_id == stage_id)
        self._engine = make_stage(self._stage, self._bound)
        self._outboxes = Outboxes(config.limits.outbox_max_bytes)
        self._requests = 0
        self._source = RemoteStage(source, config.handover.transport) if source is not None else None
        await self._engine.start()

    async def generate(
        self, request: OmniRequest, ticket: Ticket | None = None
    ) -> AsyncGenerator[Ticket | StageChunk, None]:
        """See the class. `ticket`: where the stage's source keeps this request."""
        self._requests += 1
        outbox = self._outboxes.open(request.request_id) if self._has_consumer(request) else None
        try:
            yield Ticket(request.request_id, own_replica_id())
            async with contextlib.aclosing(self._fill(request, ticket, outbox)) as chunks:
                async for chunk in chunks:
                    yield chunk
            if outbox is not None:
                await asyncio.sleep(self._bound.config.limits.request_timeout_s)  # until cancelled: the request's end
        finally:
            self._outboxes.remove(request.request_id)

    def _has_consumer(self, request: OmniRequest) -> bool:
        return request.wants_audio and bool(self._bound.consumers(self._stage))

    async def _fill(
        self, request: OmniRequest, ticket: Ticket | None, outbox: Outbox | None
    ) -> AsyncGenerator[StageChunk, None]:
        try:
            handover = Handover()
            upstream = self._upstream(ticket)
            source = handover.watched(upstream) if upstream is not None else None
            async with contextlib.aclosing(self._engine.generate(request, source)) as chunks:
                async for made in chunks:
                    chunk = stamped(handover.signed(made))
                    if outbox is not None:
                        outbox.put(chunk)
                    yield chunk.without_rows()
            if outbox is not None:
                outbox.close()
        except Exception as error:
            if outbox is not None:
                outbox.fail(error)
            raise

    def _upstream(self, ticket: Ticket | None) -> AsyncGenerator[StageChunk, None] | None:
        source = self._bound.source(self._stage)
        if source is None or ticket is None or self._source is None:
            return None
        limits = self._bound.config.limits
        return pull(self._source, ticket, limits.max_payload_elements)

    async def chunk(self, request_id: str, number: int) -> WireChunk:
        """One of the request's chunks that are there. OutboxUnknown after the request's end."""
        return WireChunk.of(self._outboxes.get(request_id).chunk(number))

    async def chunks(self, request_id: str) -> AsyncGenerator[WireChunk | BulkChunk, None]:
        """The request's chunks, those that are there together as one item; a large one only by its number."""
        most = self._bound.config.handover.max_item_bytes
        async with contextlib.aclosing(self._outboxes.get(request_id).items(most)) as items:
            async for number, chunk in items:
                yield BulkChunk(number) if chunk_bytes(chunk) > most else WireChunk.of(chunk)

    async def check_health(self) -> None:
        await self._engine.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks this of every replica, for the autoscaling policy."""
        return {LOAD: engine_load(await self._engine.counts())}

    async def status(self) -> dict[str, Any]:
        """For tests and operators: process id, requests so far, open outboxes, what the engine holds."""
        return {
            "pid": os.getpid(),
            "replica_id": own_replica_id(),
            "requests": self._requests,
            "open_outboxes": len(self._outboxes),
            "engine": await self._engine.counts(),
        }

    async def __del__(self) -> None:
        await self._engine.shutdown()
