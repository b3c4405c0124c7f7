"""While a running application answers, every panel of the board has data, and its counts are those of its clients."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass

import httpx
import pytest
import ray

from omni_cluster.api_client import Part, events_of_async
from tests.http_app import nothing_is_left
from tests.served.app import BASE_URL, ServedApp, until, whole_scrape
from tests.served.prometheus_server import Prometheus, expressions, needs_prometheus, prometheus
from tests.served.traces import BODY, CHAT
from tests.server.samples import Totals, totals

pytestmark = pytest.mark.full

CLIENTS = 4
SHOWN_S = 180
"""Until the panels have data: Ray samples every 10 s, and a rate needs two of its samples."""

COUNTED = (f'ingress_requests_total{{endpoint="{CHAT}",status="200"}}', 'stage_samples_total{stage="code2wav"}')


@dataclass
class Heard:
    """What clients counted of their answers."""

    answers: int = 0
    samples: int = 0

    def add(self, parts: list[Part]) -> None:
        self.answers += 1
        self.samples += sum(len(part.sound) for part in parts) // 2


@contextlib.asynccontextmanager
async def clients_ask() -> AsyncIterator[Heard]:
    """One answer after another by each client; all are read to their end, also the last ones."""
    heard, asks = Heard(), asyncio.Event()
    asks.set()
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=120) as http, asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(_ask_while(asks, http, heard))
        try:
            yield heard
        finally:
            asks.clear()


async def _ask_while(asks: asyncio.Event, http: httpx.AsyncClient, heard: Heard) -> None:
    while asks.is_set():
        async with http.stream("POST", CHAT, json=BODY) as answer:
            assert answer.status_code == 200, await answer.aread()
            heard.add([Part.of(event) async for event in events_of_async(answer.aiter_lines())])


def pages_of_ray() -> list[str]:
    return [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]


def counts(scraped: Totals) -> tuple[float, float]:
    """Answers, and samples of sound, of the replicas that live."""
    return scraped["ingress_requests_total", CHAT, "200"], scraped["stage_samples_total", "code2wav"]


async def counts_of_ray(server: Prometheus, living: Collection[str]) -> tuple[float, ...]:
    """The same; Ray's page keeps the counters of replicas that have ended."""
    by_replica = [await server.query(f"sum by (replica) (ray_omni_cluster_{each})", "replica") for each in COUNTED]
    return tuple(sum(series.get((replica,), 0) for replica in living) for series in by_replica)


async def living_replicas() -> set[str]:
    return set(re.findall(r'replica="([^"]+)"', await whole_scrape()))


@needs_prometheus
async def test_every_panel_has_data_and_the_counts_are_those_of_the_clients(served: ServedApp) -> None:
    await until(lambda: nothing_is_left(served), "earlier requests are gone")
    answers, samples = counts(totals(await whole_scrape()))
    waiting = {query for queries in expressions().values() for query in queries}
    async with prometheus({"ray": pages_of_ray()}) as server:

        async def all_have_data() -> bool:
            waiting.difference_update([each for each in waiting if await server.has_data(each)])
            return not waiting

        async with clients_ask() as heard:
            try:
                await until(all_have_data, "every panel has data", SHOWN_S)
            finally:
                assert sorted(waiting) == []
        counted = (answers + heard.answers, samples + heard.samples)
        assert heard.samples

        async def we_have_the_same() -> bool:
            return counts(totals(await whole_scrape())) == counted

        await until(we_have_the_same, "the ingress has counted the last answers")

        living = await living_replicas()

        async def ray_has_the_same() -> bool:
            return await counts_of_ray(server, living) == counted

        await until(ray_has_the_same, "Ray's page has the same", SHOWN_S)
