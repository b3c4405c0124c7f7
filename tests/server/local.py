"""The whole API over a pipeline in this process, on a loop of its own: what a test asks it, in its own thread too."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx

from omni_cluster.config.access import ApiConfig
from omni_cluster.config.limits import Limits
from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.fan_in import StageEvent
from omni_cluster.engine.metrics import StageMetrics
from omni_cluster.engine.omni_llm import AsyncOmniLLM, OmniLLM
from omni_cluster.serve_local import listening, serving
from omni_cluster.types.inputs import OmniRequest

STAGES = ("thinker", "talker", "code2wav")
KEPT = ("running", "waiting", "held", "kv_blocks_used", "held_blocks", "row_counts", "emitting", "streams")
"""What an engine's counts say that it holds of requests."""


class LocalApp:
    """The API over an `OmniLLM`'s engines."""

    def __init__(self, omni: OmniLLM, url: str) -> None:
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=120)
        self._pipeline: AsyncOmniLLM = omni._async
        self._loop = omni._loop

    async def counts(self) -> dict[str, dict[str, int]]:
        """What each engine holds."""
        asked = asyncio.run_coroutine_threadsafe(self._pipeline.counts(), self._loop)
        return await asyncio.wrap_future(asked)

    async def nothing_is_left(self) -> bool:
        counts = await self.counts()
        is_open = any(self._pipeline._open_logs.values())
        return not is_open and not any(each.get(name) for each in counts.values() for name in KEPT)

    async def work_done(self) -> dict[str, Any]:
        """How many requests each stage has had, and which steps its engine took."""
        steps = {name: each.get("steps") for name, each in (await self.counts()).items()}
        ended = {name: _requests_ended(metrics) for name, metrics in self._pipeline._metrics.items()}
        return {"steps": steps, "requests": ended}


def _requests_ended(metrics: StageMetrics) -> float:
    return sum(
        sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "omni_cluster_stage_requests_total"
    )


class _Changed:
    """A pipeline with other keys of its configuration. `codes`: of each answer with sound, whatever was asked."""

    def __init__(self, pipeline: AsyncOmniLLM, codes: int | None, keys: Mapping[str, Any]) -> None:
        self._pipeline = pipeline
        self._codes = codes
        config = pipeline.bound.config.model_copy(update=keys)
        self.bound = dataclasses.replace(pipeline.bound, config=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def stream(self, request: OmniRequest, deadline: Deadline) -> AsyncGenerator[StageEvent, None]:
        if self._codes is not None and request.wants_audio:
            talker = {**request.sampling.get("talker", {}), "min_tokens": self._codes, "max_tokens": self._codes}
            request = dataclasses.replace(request, sampling={**request.sampling, "talker": talker})
        return self._pipeline.stream(request, deadline)


@contextmanager
def local_app(
    omni: OmniLLM, limits: Limits | None = None, *, api: ApiConfig | None = None, codes: int | None = None
) -> Iterator[LocalApp]:
    """Serves the API on a free port, by the loop of the engines.

    `limits`, `api`: in place of those of its configuration; `codes`: of each answer with sound.
    """
    keys = {name: value for name, value in {"limits": limits, "api": api}.items() if value is not None}
    pipeline: Any = _Changed(omni._async, codes, keys) if keys or codes else omni._async
    ends = asyncio.Event()
    url: asyncio.Queue[str] = asyncio.Queue()

    async def serve() -> None:
        async with _server(pipeline) as address:
            await url.put(address)
            await ends.wait()

    serves = asyncio.run_coroutine_threadsafe(serve(), omni._loop)
    try:
        address = asyncio.run_coroutine_threadsafe(url.get(), omni._loop).result(timeout=60)
        app = LocalApp(omni, address)
        with app.client:
            yield app
    finally:
        omni._loop.call_soon_threadsafe(ends.set)
        serves.result(timeout=60)


@asynccontextmanager
async def _server(pipeline: AsyncOmniLLM) -> AsyncIterator[str]:
    with listening("127.0.0.1", 0) as listener:
        async with serving(pipeline, listener) as server:
            yield server.url
