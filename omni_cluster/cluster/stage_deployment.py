"""One replica of one stage: its engine, and the logs that its consumers pull from."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import os
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import asdict, replace
from logging.handlers import MemoryHandler
from typing import Any

import ray
import ray.util
from ray.serve.handle import DeploymentHandle

from omni_cluster.cluster.consumer import ReplicaConnections
from omni_cluster.cluster.failures import lost_with, named_failures
from omni_cluster.cluster.metrics import RayMetrics, engine_stat_logger, pushed_in_turn
from omni_cluster.cluster.producer import MAX_ITEM_BYTES, Address, SocketServer
from omni_cluster.cluster.row_objects import RowsItem
from omni_cluster.cluster.staged import IncomingMedia
from omni_cluster.cluster.starting import end_start, run_until_closed, start_step, without_collector
from omni_cluster.cluster.transport import RemoteStage, Ticket, own_replica_id
from omni_cluster.cluster.watchdog import Watchdog, beat_while_healthy
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine.build import bind, make_stage, runs_on_vllm, stage_class, uses_vllm
from omni_cluster.engine.caches import use_cache_dir
from omni_cluster.engine.cards import environment
from omni_cluster.engine.driver import run_stage
from omni_cluster.engine.exposition import ReplicaMetrics
from omni_cluster.engine.fitting import fit_replica, measure_replica
from omni_cluster.engine.metric_definitions import STAGE
from omni_cluster.engine.metrics import Outcome, RequestMeter, StageMetrics
from omni_cluster.engine.output_log import OutputLog, OutputLogs, OutputLogUnknown
from omni_cluster.planning.policy import Sample
from omni_cluster.types.errors import OmniError, without_frames
from omni_cluster.types.inputs import Media, OmniRequest
from omni_cluster.types.outputs import StageChunk
from omni_cluster.vllm_engine.engine_processes import ENGINE_PROCESSES
from omni_cluster.vllm_engine.known_warnings import drop_known_warnings

logger = logging.getLogger("ray.serve")

FIRST_READER_S = 30.0
"""An ingress reads a request's log as soon as it has the ticket. The end of a call that is cancelled while it begins
may get lost in Serve: then no reader comes."""
MAX_SAMPLES = MAX_ITEM_BYTES // 4
"""Sound of a chunk, float32: a long answer's travels in several messages."""


class StageReplica:
    """Runs a stage's engine in this Serve replica.

    For each request `generate` gives the ingress a ticket, and then stays open until the ingress says that the answer
    is whole, or cancels it: as long as it is open, other replicas can read what the stage makes of the request, from
    the start if need be.
    """

    async def __init__(  # type: ignore[misc]
        self, stage_id: int, config: PipelineConfig, source: DeploymentHandle | None = None
    ) -> None:
        """Serve awaits this: a replica takes requests once its engine is up."""
        self._closing: contextlib.AsyncExitStack | None = None
        stage = next(s for s in config.stages if s.stage_id == stage_id)
        self._watchdog = Watchdog(stage.stall_timeout_s)
        async with contextlib.AsyncExitStack() as closing:  # a start that fails leaves nothing
            await self._start(stage, config, source, closing)
            self._closing = closing.pop_all()

    async def _start(
        self,
        stage: StageConfig,
        config: PipelineConfig,
        source: DeploymentHandle | None,
        closing: contextlib.AsyncExitStack,
    ) -> None:
        use_cache_dir(config.cache_dir)
        if stage.gpus_per_replica or runs_on_vllm(stage, config):  # else the engine has no process of its own
            ENGINE_PROCESSES.import_beside()
        step = functools.partial(start_step, stage.model_stage)
        with step("imports its libraries"), without_collector():
            # The cards are measured in a process of their own: it takes five seconds, this one's imports longer.
            measured, _ = await asyncio.gather(
                asyncio.to_thread(measure_replica, stage), asyncio.to_thread(_import_engine, stage, config)
            )
        with step("reads the checkpoint"):
            self._bound = await asyncio.to_thread(lambda: fit_replica(bind(config), stage, measured))
        self._stage: StageConfig = next(s for s in self._bound.config.stages if s.stage_id == stage.stage_id)
        with step("imports the model"), without_collector():
            self._engine = make_stage(self._stage, self._bound, _stat_loggers(self._stage, config))
        closing.push_async_callback(self._engine.shutdown)
        self._logs = OutputLogs(config.limits.outbox_max_bytes, config.limits.replica_outbox_max_bytes)
        self._incoming = IncomingMedia()
        self._requests = 0
        self._metrics = StageMetrics()
        self._sockets = SocketServer(self._logs, ray.util.get_node_ip_address())
        closing.push_async_callback(self._sockets.close)
        self._source = self._connections_to(source) if source is not None else None
        if self._source is not None:
            closing.push_async_callback(self._source.close)
        with step("starts the engine"), environment(_where_ray_is(stage)):
            await self._engine.start()
        run_until_closed(beat_while_healthy(self._watchdog, self._engine.check_health), closing)
        if config.ray_metrics:
            run_until_closed(self._push_metrics(), closing)
        end_start(stage.model_stage)

    async def _push_metrics(self) -> None:
        labels = {"stage": self._stage.model_stage}
        await pushed_in_turn(RayMetrics(self._metrics.registry, STAGE, labels), self._hold)

    def _connections_to(self, source: DeploymentHandle) -> ReplicaConnections:
        max_elements = self._bound.config.limits.max_payload_elements
        return ReplicaConnections(RemoteStage(source), max_elements, budget=self._logs.budget)

    async def generate(
        self, request: OmniRequest, ticket: Ticket | None = None, has_media: bool = False
    ) -> AsyncGenerator[Ticket, None]:
        """See the class. `ticket`: where the stage's source keeps this request; `has_media`: `bring` is called next."""
        self._check_engine()
        self._requests += 1
        meter = self._metrics.begin(request.known_of(self._stage.model_stage))
        log = self._logs.open(request.request_id)
        try:
            with self._incoming.expecting(request.request_id):
                yield Ticket(request.request_id, own_replica_id())
                await self._until_let_go(log, self._fill(log, request, ticket, meter, has_media))
        finally:
            self._logs.remove(request.request_id)
            self._end(request, meter, "cancelled")

    def _check_engine(self) -> None:
        """Raises StageDied before the replica takes anything: this process ends a moment after its engine."""
        with named_failures(own_replica_id()):
            self._engine.check_runs()

    async def bring(self, request_id: str, media: Media) -> None:
        """The media of a request whose ticket was given."""
        self._incoming.bring(request_id, media)

    async def _until_let_go(self, log: OutputLog, filling: Coroutine[Any, Any, None]) -> None:
        """Fills the log until the request is cancelled, or no reader wants it any more."""
        filler = asyncio.create_task(filling)
        try:
            async with asyncio.timeout(self._bound.config.limits.request_timeout_s):
                await log.until_given_up(FIRST_READER_S)
        except TimeoutError:
            pass  # the ingress has given up by now
        finally:
            filler.cancel()
            await asyncio.gather(filler, return_exceptions=True)
            del filler  # its exception holds frames, and these the request's media

    async def _fill(
        self, log: OutputLog, request: OmniRequest, ticket: Ticket | None, meter: RequestMeter, has_media: bool
    ) -> None:
        """Whatever breaks, readers of the log get the error, now or later."""
        try:
            if has_media:
                request = await self._with_media(request)
            async with (
                self._logs.budget.taken(log),
                contextlib.aclosing(run_stage(self._engine, request, self._upstream(ticket), meter)) as chunks,
            ):
                async for made in chunks:
                    for part in made.cut(MAX_SAMPLES):
                        log.put(part)
                    if made.finish_reason is not None:
                        self._end(request, meter, "finished")
            log.close()
        except Exception as error:
            if not isinstance(error, OmniError):
                logger.exception("request %s failed in stage %s", request.request_id, self._stage.model_stage)
            # The source drops a request only when its client leaves, and may hear of that earlier than this stage.
            self._end(request, meter, "cancelled" if isinstance(error, OutputLogUnknown) else "failed")
            log.fail(without_frames(lost_with(error, own_replica_id())))

    async def _with_media(self, request: OmniRequest) -> OmniRequest:
        media = await self._incoming.take(request.request_id)
        return replace(request, media=await asyncio.to_thread(media.as_images))

    def _end(self, request: OmniRequest, meter: RequestMeter, outcome: Outcome) -> None:
        """Counts and logs how the request ended, unless it has ended before."""
        if meter.end(outcome):
            logger.info(
                "request %s: %s in stage %s after %.3f s, %d tokens, %d samples",
                request.request_id,
                outcome,
                self._stage.model_stage,
                meter.seconds,
                meter.tokens,
                meter.samples,
            )

    def _upstream(self, ticket: Ticket | None) -> AsyncGenerator[StageChunk, None] | None:
        if ticket is None or self._source is None:
            return None
        return self._source.read(ticket, with_rows=True)

    async def address(self) -> Address:
        return await self._sockets.address()

    async def rows(self, name: str, first: int = 0) -> AsyncGenerator[RowsItem, None]:
        """See `RowsPublishers.items`."""
        async with contextlib.aclosing(self._sockets.rows_publishers.items(name, first)) as items:
            async for item in items:
                yield item

    async def check_health(self) -> None:
        await self._engine.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks this of every replica, for the autoscaling policy: its `Sample`, by the names of the fields."""
        counts = await self._engine.counts()
        return asdict(Sample.of_replica(counts, self._metrics.backlog_tokens, len(self._logs)))

    async def awake(self) -> None:
        """Says nothing: a call that waits for a replica is what wakes a stage that sleeps."""

    async def metrics(self) -> ReplicaMetrics:
        """What this replica counted so far and holds now, under its stage's name and its own."""
        await self._hold()
        return ReplicaMetrics.of(self._metrics.registry, own_replica_id(), stage=self._stage.model_stage)

    async def _hold(self) -> None:
        counts = await self._engine.counts()
        self._metrics.hold(counts, len(self._logs), self._logs.budget.held_bytes)

    async def status(self) -> dict[str, Any]:
        """For tests and operators: where it runs, its requests, open logs and connections, what the engine holds."""
        return {
            "pid": os.getpid(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "replica_id": own_replica_id(),
            "requests": self._requests,
            "open_outboxes": len(self._logs),
            "held_bytes": self._logs.budget.held_bytes,
            "open_links": len(self._sockets),
            "open_rows_calls": self._sockets.rows_publishers.calls,
            "rows_sent_bytes": dict(self._sockets.rows_sent_bytes),
            "engine": await self._engine.counts(),
        }

    async def __del__(self) -> None:
        """The watchdog sees to what is left of a replica that did not come up, or is still starting, as it ends."""
        if self._closing is not None:
            await self._closing.aclose()
            self._watchdog.close()


def _stat_loggers(stage: StageConfig, config: PipelineConfig) -> Sequence[type]:
    return (engine_stat_logger(),) if config.ray_metrics and runs_on_vllm(stage, config) else ()


def _where_ray_is(stage: StageConfig) -> dict[str, str]:
    """What an engine's process must know to start parts of its model on other hosts."""
    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address} if stage.hosts_per_replica > 1 else {}


def _import_engine(stage: StageConfig, config: PipelineConfig) -> None:
    """What of vLLM configures logging closes all handlers that are there: Serve's would write nothing more."""
    if not uses_vllm(stage, config):
        return
    drop_known_warnings()
    targets = [(each, each.target) for each in logger.handlers if isinstance(each, MemoryHandler)]
    importlib.import_module("vllm.logger")
    for handler, target in targets:
        handler.setTarget(target)
    stage_class(stage, config)
