"""What answers the rows: an application that runs, or engines of the batch's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from omni_cluster.api_client import CONNECT_TIMEOUT_S
from omni_cluster.batch.errors import BatchError
from omni_cluster.batch.limits import BatchLimits
from omni_cluster.config.access import ApiConfig
from omni_cluster.config.loader import load_config
from omni_cluster.config.schema import PipelineConfig
from omni_cluster.engine.cards import CPU_ENVIRONMENT, GPU_ENVIRONMENT
from omni_cluster.engine.omni_llm import AsyncOmniLLM
from omni_cluster.models.registry import known_families
from omni_cluster.server.app import HttpServer


class Source(Protocol):
    """The server that a batch asks, and what Ray counts of each process of the batch."""

    @property
    def processes(self) -> int: ...

    def ray_options(self) -> Mapping[str, Any]: ...

    def opened(self, limits: BatchLimits) -> Any:
        """An asynchronous context: a client whose requests the source answers."""


@dataclass(frozen=True, kw_only=True)
class Application:
    """A running application, asked by HTTP from `processes` processes. `url` is without /v1."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    processes: int = 1

    def ray_options(self) -> Mapping[str, Any]:
        """Asking is waiting: it takes no CPU in Ray's books."""
        return {"num_cpus": 0}

    @asynccontextmanager
    async def opened(self, limits: BatchLimits) -> AsyncIterator[httpx.AsyncClient]:
        """Raises BatchError for a URL that is none."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = httpx.Timeout(limits.timeout_s, connect=CONNECT_TIMEOUT_S, pool=None)
        connections = httpx.Limits(max_connections=limits.rows_at_once + 1)
        url = _checked(self.url)
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=connections) as http:
            yield http


def _checked(url: str) -> httpx.URL:
    try:
        checked = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise BatchError(f"url is {url!r} ({error}); use one such as http://127.0.0.1:8000.") from None
    if checked.scheme not in ("http", "https") or not checked.host:
        raise BatchError(f"url is {url!r}; use one such as http://127.0.0.1:8000.")
    return checked


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Engines of the batch's own: `processes` pipelines, each with all stages of `config` in one process.

    `config`: a file that every host can read, or the configuration itself; None: the embedded default. `num_cpus` and
    `num_gpus`: what Ray counts of each pipeline; a configuration whose stages name their `gpus` needs whole hosts.
    """

    config: PipelineConfig | Path | str | None = None
    processes: int = 1
    num_cpus: float = 1
    num_gpus: float = 0

    def ray_options(self) -> Mapping[str, Any]:
        variables = GPU_ENVIRONMENT if self.num_gpus else CPU_ENVIRONMENT
        return {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "runtime_env": {"env_vars": variables}}

    @asynccontextmanager
    async def opened(self, limits: BatchLimits) -> AsyncIterator[httpx.AsyncClient]:
        """Starts the engines, and ends them. They are asked by the HTTP face too, so that one code checks and answers.

        Raises ConfigError.
        """
        pipeline = AsyncOmniLLM(_without_keys(self.config))
        await pipeline.start()
        server = HttpServer(pipeline)
        try:
            transport = httpx.ASGITransport(server.app())
            async with httpx.AsyncClient(transport=transport, base_url="http://engines") as http:
                yield http
        finally:
            await server.close()
            await pipeline.shutdown()


def _without_keys(config: PipelineConfig | Path | str | None) -> PipelineConfig:
    """These engines answer the batch alone, so no key guards them."""
    if not isinstance(config, PipelineConfig):
        config = load_config(config, known_families=known_families())
    return config.model_copy(update={"api": ApiConfig()})
