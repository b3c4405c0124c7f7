"""The metrics of the whole application in one answer, whichever ingress is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from ray import serve
from ray.serve.handle import DeploymentHandle

from omni_cluster.cluster.transport import ask_all, known_replicas
from omni_cluster.engine.exposition import ReplicaMetrics, merged, text_of
from omni_cluster.engine.metric_definitions import MISSING

WAIT_S = 2.0


class Scrape:
    """Asks every running replica for its metrics: those of all stages, and the other ingresses.

    A replica that does not answer within `WAIT_S` is left out, and counted: its samples are in a later scrape again,
    for they are counted where they are made. `sleepers`: stages that may have none.
    """

    def __init__(self, stages: Mapping[str, DeploymentHandle], ingresses: int, sleepers: Collection[str] = ()) -> None:
        self._sleepers = sleepers
        self._stages = stages
        self._ingresses = ingresses

    async def text(self, own: ReplicaMetrics) -> bytes:
        """Of all of them in Prometheus' text format; `own`: what the ingress that was asked has counted itself."""
        ingress = serve.get_replica_context().deployment
        others, *stages = await asyncio.gather(
            self._other_ingresses(ingress, own.replica),
            *(self._replicas_of(name, handle) for name, handle in self._stages.items()),
        )
        answers = {ingress: [own, *others], **dict(zip(self._stages, stages, strict=True))}
        given = [
            metric for each in answers.values() for answer in each if answer is not None for metric in answer.metrics
        ]
        return text_of([*merged(given), missing({name: each.count(None) for name, each in answers.items()})])

    async def _replicas_of(self, name: str, handle: DeploymentHandle) -> list[ReplicaMetrics | None]:
        answers = await ask_all(handle, "metrics", WAIT_S)
        return [] if name in self._sleepers and not known_replicas(handle.app_name, name) else answers

    async def _other_ingresses(self, ingress: str, own_replica: str) -> list[ReplicaMetrics | None]:
        """What each of the others answers, None where it does not in time; a full one would not answer itself."""
        if self._ingresses == 1:
            return []
        answers = await ask_all(await asyncio.to_thread(_handle_of, ingress), "metrics", WAIT_S)
        others = [answer for answer in answers if answer is not None and answer.replica != own_replica]
        return [*others, *[None] * (len(answers) - 1 - len(others))]


def _handle_of(deployment: str) -> DeploymentHandle:
    return serve.get_deployment_handle(deployment, serve.get_replica_context().app_name)


def missing(by_stage: Mapping[str, int]) -> Metric:
    metric = GaugeMetricFamily(MISSING.name, MISSING.help, labels=MISSING.labels)
    for stage, count in by_stage.items():
        metric.add_metric([stage], count)
    return metric
