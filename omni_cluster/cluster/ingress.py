"""The deployment that clients reach: the HTTP face over the stages' deployments."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping

from ray import serve
from ray.exceptions import TaskCancelledError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_cluster.cluster.failures import FULL, named
from omni_cluster.cluster.metrics import RayMetrics, pushed_in_turn
from omni_cluster.cluster.serve_pipeline import ServePipeline
from omni_cluster.cluster.starting import run_until_closed
from omni_cluster.cluster.transport import own_replica_id
from omni_cluster.config.schema import PipelineConfig
from omni_cluster.engine.build import bind
from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.exposition import ReplicaMetrics
from omni_cluster.engine.metric_definitions import INGRESS
from omni_cluster.engine.pipeline import whole_answer
from omni_cluster.server import http_protocol
from omni_cluster.server.app import HttpServer
from omni_cluster.server.log import logger
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import OmniRequestOutput

CLIENT_LEFT: Mapping[str, Message] = {
    "http": {"type": "http.disconnect"},
    "websocket": {"type": "websocket.disconnect", "code": 1005},  # ASGI's own for a close without a code
}


@serve.ingress()
class Ingress:
    """`HttpServer` in a replica of Ray Serve."""

    def __init__(self, config: PipelineConfig, handles: Mapping[str, DeploymentHandle]) -> None:
        log_as_serve()
        http_protocol.use_in_this_process()  # HAProxy has no router, and comes here by HTTP
        self._closing = contextlib.AsyncExitStack()  # Serve ends a replica that did not come up too
        self._pipeline = ServePipeline(bind(config), handles)
        self._closing.callback(self._pipeline.close)
        # Serve's proxy adds the request's id to every answer.
        self._server = HttpServer(self._pipeline, ingresses=config.ingress_replicas, answers_id=False)
        self._closing.push_async_callback(self._server.close)
        run_until_closed(self._server.stand_by(), self._closing)
        if config.ray_metrics:
            run_until_closed(pushed_in_turn(RayMetrics(self._server.metrics.registry, INGRESS, {})), self._closing)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Serve asks for it once this object is made: the keys are read here, and never travel through Ray."""
        return until_client_leaves(self._server.app())

    async def metrics(self) -> ReplicaMetrics:
        """What this ingress counted so far, for the ingress that is scraped."""
        return ReplicaMetrics.of(self._server.metrics.registry, own_replica_id())

    async def answer(self, request: OmniRequest) -> OmniRequestOutput:
        """The whole answer to a request, for callers inside the cluster: tokens and samples as they are."""
        self._pipeline.check(request)
        deadline = Deadline(self._pipeline.bound.config.limits.request_timeout_s)
        async with deadline.kept(), self._server.admission.slots.one():
            return await whole_answer(self._pipeline, request, deadline)

    async def let_all_end(self) -> None:
        """Turns new requests away, and waits for those that run; called before Serve ends."""
        await self._server.let_all_end()

    async def __del__(self) -> None:
        await self._closing.aclose()


def until_client_leaves(app: ASGIApp) -> ASGIApp:
    """The app with a `receive` as ASGI has it: once the client has left, Serve's may raise what ended its own call.

    A body comes from Serve's proxy as Ray objects: StoreFull is raised for one that finds no room.
    """

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        async def received() -> Message:
            try:
                return await receive()
            except TaskCancelledError:
                return CLIENT_LEFT[scope["type"]]
            except FULL as error:
                raise named(error) from error

        await app(scope, received if scope["type"] in CLIENT_LEFT else receive, send)

    return called


def log_as_serve() -> None:
    """What the HTTP face logs stands in the replica's log, in Serve's form."""
    logger.addFilter(_handed_to_serve)
    logger.setLevel(logging.DEBUG)  # Serve's own level decides


def _handed_to_serve(record: logging.LogRecord) -> bool:
    """Drops the record here: Serve's logger has it."""
    serve_logger = logging.getLogger("ray.serve")
    if serve_logger.isEnabledFor(record.levelno):
        serve_logger.handle(record)
    return False
