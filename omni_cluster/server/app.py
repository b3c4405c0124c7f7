"""The HTTP face over a pipeline, as one ASGI application."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp

from omni_cluster.engine.pipeline import Pipeline
from omni_cluster.openai_api.access import OPEN_PATHS, guarded
from omni_cluster.openai_api.errors import route_refused
from omni_cluster.server.admission import Admission
from omni_cluster.server.answers import api_keys
from omni_cluster.server.endpoints.chat import ChatEndpoint
from omni_cluster.server.endpoints.completions import CompletionsEndpoint
from omni_cluster.server.endpoints.models import ModelsEndpoint
from omni_cluster.server.endpoints.operations import OperationsEndpoint
from omni_cluster.server.endpoints.playground import PATHS as PAGE_PATHS
from omni_cluster.server.endpoints.playground import PlaygroundEndpoint
from omni_cluster.server.endpoints.realtime import RealtimeEndpoint
from omni_cluster.server.endpoints.responses import ResponsesEndpoint
from omni_cluster.server.endpoints.speech import SpeechEndpoint
from omni_cluster.server.endpoints.speech_stream import SpeechStreamEndpoint
from omni_cluster.server.endpoints.tokens import TokensEndpoint
from omni_cluster.server.endpoints.transcriptions import TranscriptionsEndpoint
from omni_cluster.server.metrics import IngressMetrics, Metered
from omni_cluster.server.quotas import Clock
from omni_cluster.server.reader import Reader
from omni_cluster.server.request_builder import RequestBuilder
from omni_cluster.server.services import Services as Services

CODING_THREADS = 4
GREETING = [{"role": "user", "content": "Hello"}]


class Endpoint(Protocol):
    """Some paths of the API."""

    def add_to(self, api: FastAPI) -> None: ...


MakeEndpoint = Callable[[Services], Endpoint]
OF_TEXT: Final[tuple[MakeEndpoint, ...]] = (
    ChatEndpoint,
    ResponsesEndpoint,
    TranscriptionsEndpoint,
    CompletionsEndpoint,
    TokensEndpoint,
    RealtimeEndpoint,
    PlaygroundEndpoint,
)
"""Those of a family that answers in text."""
ENDPOINTS: Final[tuple[MakeEndpoint, ...]] = (
    lambda its: OperationsEndpoint(its.pipeline, its.counted, its.admission.closing),
    lambda its: ModelsEndpoint(its.pipeline.bound),
    SpeechEndpoint,
    SpeechStreamEndpoint,
    *OF_TEXT,
)


class HttpServer:
    """The endpoints, behind access checks, admission and metrics.

    `ingresses`: how many servers share the requests that the configuration lets run at once. `answers_id`: False if
    what is in front of the application adds the request's id to every answer.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        ingresses: int = 1,
        answers_id: bool = True,
        clock: Clock = time.monotonic,
        endpoints: Sequence[MakeEndpoint] = ENDPOINTS,
    ) -> None:
        """Raises ConfigError for API keys that cannot be read."""
        bound = pipeline.bound
        self._api_config = bound.config.api
        self._answers_id = answers_id
        self._keys = api_keys(bound.config)
        self.metrics = IngressMetrics()
        self.admission = Admission(bound.config.limits, ingresses, bound.config.api, clock, self.metrics)
        self._reader = Reader(bound)
        self._coding = ThreadPoolExecutor(CODING_THREADS, thread_name_prefix="coding")
        builder = RequestBuilder(pipeline)
        services = Services(pipeline, self._reader, builder, self.admission, self.metrics.registry, self._coding)
        chats = bound.family.chats()
        self._endpoints = [make(services) for make in endpoints if chats or make not in OF_TEXT]
        if chats:
            bound.family.render(GREETING)  # loads what it needs, or the first request would wait for that

    def app(self) -> ASGIApp:
        api = FastAPI(title="omni_cluster", docs_url=None, redoc_url=None)
        api.add_exception_handler(HTTPException, route_refused)
        for endpoint in self._endpoints:
            endpoint.add_to(api)
        app = guarded(
            self.admission.before(api),
            keys=self._keys,
            origins=self._api_config.cors_origins,
            answers_id=self._answers_id,
            open_paths=OPEN_PATHS | PAGE_PATHS,
        )
        paths = [route.path for route in api.routes if isinstance(route, Route | WebSocketRoute)]
        return Metered(app, self.metrics, paths)

    async def stand_by(self) -> None:
        """Keeps ready what the next request would wait for, until it is cancelled."""
        await self._reader.stand_by()

    async def let_all_end(self) -> None:
        """Turns new requests away, and returns when those that run have ended, by themselves or for want of time."""
        await self.admission.closing.close(self.admission.limits.closing_grace_s)

    async def close(self) -> None:
        await self._reader.close()
        self._coding.shutdown(wait=False)
