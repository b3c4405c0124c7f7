"""What endpoints are made of."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prometheus_client.registry import Collector

from omni_cluster.engine.build import BoundPipeline
from omni_cluster.engine.pipeline import Pipeline
from omni_cluster.server.admission import Admission
from omni_cluster.server.reader import Reader
from omni_cluster.server.request_builder import RequestBuilder


@dataclass(frozen=True, slots=True)
class Services:
    """`counted`: what the HTTP face itself has counted; `coding`: threads for sound."""

    pipeline: Pipeline
    reader: Reader
    builder: RequestBuilder
    admission: Admission
    counted: Collector
    coding: ThreadPoolExecutor

    @property
    def bound(self) -> BoundPipeline:
        return self.pipeline.bound
