"""A pipeline that says one word at once and a second of sound when it may: what stands before one is tested with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
from prometheus_client.registry import Collector

from omni_cluster.config.schema import PipelineConfig
from omni_cluster.engine.build import BoundPipeline, bind
from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.fan_in import StageEvent
from omni_cluster.serve_local import listening, serving
from omni_cluster.server.app import ENDPOINTS, HttpServer, MakeEndpoint
from omni_cluster.types.errors import OmniError
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import AudioChunk, CallDelta, StageChunk
from omni_cluster.types.tool_use import ToolUse

RATE_HZ = 24_000
CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/speech"


class Speaker:
    """See `Pipeline`."""

    def __init__(self, config: PipelineConfig) -> None:
        self._bound = bind(config)
        self.begun: list[str] = []
        self.running = self.heard = 0
        """How many run, and how many had their word taken by whoever answers the client."""
        self.living: Mapping[str, int] = {}
        self.sleepers: frozenset[str] = frozenset()
        self.calls: Sequence[CallDelta] = ()
        """What it says in place of its word, and is cut off then."""
        self.tool_use: ToolUse | None = None
        """Of the last request."""
        self.may_speak = asyncio.Event()
        self.may_speak.set()
        self.breaks: OmniError | None = None
        """What is raised in the place of the sound."""

    @property
    def bound(self) -> BoundPipeline:
        return self._bound

    def check(self, request: OmniRequest) -> None:
        pass

    async def stream(self, request: OmniRequest, deadline: Deadline) -> AsyncGenerator[StageEvent, None]:
        self.begun.append(request.request_id)
        self.tool_use = request.tool_use
        if self.calls:
            for i, call in enumerate(self.calls):
                yield StageEvent("thinker", StageChunk(token_start=i, token_ids=(1,), calls=(call,)))
            yield StageEvent("thinker", StageChunk(token_start=len(self.calls), finish_reason="length"))
            return
        self.running += 1
        try:
            yield StageEvent("thinker", StageChunk(token_ids=(1,), text="word", prompt_token_ids=(1, 2)))
            self.heard += 1
            async with deadline.kept():
                await self.may_speak.wait()
            if self.breaks is not None:
                raise self.breaks
            if request.wants_audio:
                sound = AudioChunk(0, np.zeros(RATE_HZ, np.float32), RATE_HZ)
                yield StageEvent("code2wav", StageChunk(audio=sound))
            yield StageEvent("thinker", StageChunk(token_start=1, finish_reason="stop"))
        finally:
            self.running -= 1

    async def replicas(self) -> Mapping[str, int]:
        return self.living

    async def metrics(self, own: Collector) -> bytes:
        return b""


class Face:
    """The HTTP API over a `Speaker`, and a clock that stands still until it is set."""

    def __init__(
        self, config: PipelineConfig, ingresses: int = 1, endpoints: Sequence[MakeEndpoint] = ENDPOINTS
    ) -> None:
        self.speaker = Speaker(config)
        self.now_s = 1000.0
        self.server = HttpServer(self.speaker, ingresses=ingresses, clock=lambda: self.now_s, endpoints=endpoints)
        self.app = self.server.app()
        transport = httpx.ASGITransport(self.app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://face", timeout=60)

    async def chat(self, key: str = "", **fields: Any) -> httpx.Response:
        body = {"model": self.speaker.bound.config.model, "messages": [{"role": "user", "content": "Hi"}], **fields}
        return await self.client.post(CHAT, json=body, headers=_headers(key))

    async def speech(self, key: str = "", **fields: Any) -> httpx.Response:
        body = {"model": self.speaker.bound.config.model, "input": "Hi.", "response_format": "pcm", **fields}
        return await self.client.post(SPEECH, json=body, headers=_headers(key))


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


@asynccontextmanager
async def speaking(config: PipelineConfig) -> AsyncIterator[str]:
    """The address of the same, without a clock of its own, as `omni-cluster serve --local` serves it."""
    with listening("127.0.0.1", 0) as listener:
        async with serving(Speaker(config), listener) as server:
            yield server.url


@asynccontextmanager
async def face_of(
    config: PipelineConfig, ingresses: int = 1, endpoints: Sequence[MakeEndpoint] = ENDPOINTS
) -> AsyncIterator[Face]:
    face = Face(config, ingresses, endpoints)
    async with face.client:
        yield face
    await face.server.close()
