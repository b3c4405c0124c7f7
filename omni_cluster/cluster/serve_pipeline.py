"""A pipeline whose stages are deployments of Ray Serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from prometheus_client.registry import Collector
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from omni_cluster.cluster.metrics import scraped
from omni_cluster.cluster.orchestrator import Orchestrator, stage_access
from omni_cluster.cluster.staged import staged
from omni_cluster.cluster.transport import own_replica_id, running_replicas
from omni_cluster.engine.build import BoundPipeline
from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.exposition import ReplicaMetrics
from omni_cluster.engine.fan_in import StageEvent
from omni_cluster.engine.pipeline import StatusUnknown
from omni_cluster.server.single_flight import SingleFlightCache
from omni_cluster.types.inputs import OmniRequest

READY_FRESH_S = 1.0
READY_STALE_S = 5.0
CONTROLLER_WAIT_S = 1.5
"""Probes wait for 2 s."""


class ServePipeline:
    """The `Pipeline` of an ingress. `handles`: the stages' deployments by name."""

    def __init__(self, bound: BoundPipeline, handles: Mapping[str, DeploymentHandle]) -> None:
        self.bound = bound
        config = bound.config
        of = {stage.model_stage: stage for stage in config.stages}
        self._stages = {name: stage_access(handle, of[name], config) for name, handle in handles.items()}
        self.sleepers = frozenset(stage.model_stage for stage in config.stages if stage.may_sleep)
        self._orchestrator = Orchestrator(bound, self._stages)
        self._handles = handles
        # A thread of its own: those of the requests may all be busy, and Serve's controller may hang.
        self._controller = ThreadPoolExecutor(1, "controller")
        self._running = SingleFlightCache(
            self._ask_controller, fresh_s=READY_FRESH_S, stale_s=READY_STALE_S, wait_s=CONTROLLER_WAIT_S
        )

    def check(self, request: OmniRequest) -> None:
        self.bound.check(request)

    def stream(self, request: OmniRequest, deadline: Deadline) -> AsyncGenerator[StageEvent, None]:
        return self._orchestrator.stream(staged(request), deadline)

    async def replicas(self) -> dict[str, int]:
        """Those that Serve holds to be healthy, and that are not known here to be gone.

        The routers of this process know them. The controller is asked only for stages of which they know nothing yet,
        so neither its end nor a deployment that is built anew makes a host unready.
        """
        names = [stage.model_stage for stage in self.bound.config.stages]
        living = {name: count for name in names if (count := self._stages[name].calls.count_living()) is not None}
        return living if len(living) == len(names) else {**await self._running_replicas(names), **living}

    async def _running_replicas(self, names: Sequence[str]) -> dict[str, int]:
        try:
            running = await self._running.get()
        except (TimeoutError, RayError):
            reason = f"Ray Serve's controller has not answered for {READY_STALE_S:g} s."
            raise StatusUnknown(reason) from None
        return {name: running.get(name, 0) for name in names}

    async def _ask_controller(self) -> dict[str, int]:
        return await asyncio.get_running_loop().run_in_executor(self._controller, running_replicas)

    async def metrics(self, own: Collector) -> bytes:
        """Of all replicas, other ingresses included."""
        own_metrics, ingresses = ReplicaMetrics.of(own, own_replica_id()), self.bound.config.ingress_replicas
        return await scraped(own_metrics, self._handles, ingresses, self.sleepers)

    def close(self) -> None:
        self._controller.shutdown(wait=False)
