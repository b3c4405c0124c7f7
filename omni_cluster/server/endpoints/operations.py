"""What operators and their tools ask: whether it lives, whether it serves, and what was counted."""

from __future__ import annotations

import time

from fastapi import FastAPI
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse, PlainTextResponse, Response

from omni_cluster.engine.exposition import CONTENT_TYPE, text_of
from omni_cluster.engine.metric_definitions import SCRAPED_AT
from omni_cluster.engine.pipeline import Pipeline, StatusUnknown
from omni_cluster.server.closing import Closing
from omni_cluster.server.routes import add_get
from omni_cluster.server.single_flight import SingleFlightCache

SCRAPE_WAIT_S = 10.0
SCRAPE_FRESH_S, SCRAPE_FRESH_TIMES = 1.0, 9.0
"""Scrapes take a tenth of the process' time, however many ask for them; none is as old as a scraper's interval, for two
ingresses that were asked in turn would seem to count backwards.
"""


class OperationsEndpoint:
    """`/health`, `/ready` and `/metrics`. `counted`: what the HTTP face itself has counted."""

    def __init__(self, pipeline: Pipeline, counted: Collector, closing: Closing) -> None:
        self._pipeline = pipeline
        self._closing = closing
        self._counted = counted
        self._scraped = SingleFlightCache(
            self._scrape, fresh_s=SCRAPE_FRESH_S, fresh_times=SCRAPE_FRESH_TIMES, wait_s=SCRAPE_WAIT_S
        )

    def add_to(self, api: FastAPI) -> None:
        add_get(api, "/health", self.health)
        add_get(api, "/ready", self.ready)
        add_get(api, "/metrics", self.metrics_text, response_class=PlainTextResponse)

    async def health(self) -> Response:
        """This process lives. Clients of other servers look for the word."""
        return JSONResponse({"status": "healthy"})

    async def ready(self) -> Response:
        """200 when every stage has a replica that answers, or may sleep; else 503 and how many each has, or why."""
        if self._closing.begun.is_set():
            return JSONResponse({"ready": False, "reason": "The server is closing."}, 503)
        try:
            stages = await self._pipeline.replicas()
        except StatusUnknown as unknown:
            return JSONResponse({"ready": False, "reason": str(unknown)}, 503)
        without = [name for name, count in stages.items() if not count]
        asleep = [name for name in without if name in self._pipeline.sleepers]
        is_ready = without == asleep
        said = {"ready": is_ready, "replicas": dict(stages), **({"asleep": asleep} if asleep else {})}
        return JSONResponse(said, 200 if is_ready else 503)

    async def metrics_text(self) -> Response:
        """The whole application's metrics for Prometheus, whichever ingress is asked."""
        return Response(await self._scraped.get(), media_type=CONTENT_TYPE)

    async def _scrape(self) -> bytes:
        began = taken_at(time.time())
        return await self._pipeline.metrics(self._counted) + text_of([began])


def taken_at(time_s: float) -> Metric:
    """`time_s`: Unix time. It tells a new scrape from one that was read again."""
    return GaugeMetricFamily(SCRAPED_AT.name, SCRAPED_AT.help, value=time_s)
