"""The metrics of the whole application in one answer, whichever ingress is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from ray import serve
from ray.serve.handle import DeploymentHandle

from omni_cluster.cluster.transport import ask_all

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class ReplicaMetrics:
    """What one replica, of a stage or of the ingress, counted so far and holds now."""

    replica: str
    metrics: list[Metric]

    @classmethod
    def of(cls, registry: Collector, replica: str, **labels: str) -> ReplicaMetrics:
        """All of the registry, each sample with `labels` and the replica's id too.

        Without the times at which counters were made: Prometheus' text format would have each as a metric of its own.
        """
        metrics = list(registry.collect())
        for metric in metrics:
            kept = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            metric.samples = [
                sample._replace(labels={**sample.labels, **labels, "replica": replica}) for sample in kept
            ]
        return cls(replica, metrics)


def merged(metrics: Iterable[Metric]) -> list[Metric]:
    """One metric of each name, with the samples of all: a scrape may name it only once."""
    by_name: dict[str, Metric] = {}
    for metric in metrics:
        if metric.name in by_name:
            by_name[metric.name].samples.extend(metric.samples)
        else:
            by_name[metric.name] = metric
    return list(by_name.values())


def text_of(metrics: Iterable[Metric]) -> bytes:
    """Prometheus' text format."""
    return generate_latest(_Collected(metrics))


class _Collected(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


class Scrape:
    """Asks every running replica for its metrics: those of all stages, and the other ingresses.

    A replica that does not answer within `WAIT_S` is left out, and counted: its samples are in a later scrape again,
    for they are counted where they are made.
    """

    def __init__(self, stages: Mapping[str, DeploymentHandle], ingresses: int) -> None:
        self._stages = stages
        self._ingresses = ingresses

    async def text(self, own: ReplicaMetrics) -> bytes:
        """Of all of them in Prometheus' text format; `own`: what the ingress that was asked has counted itself."""
        ingress = serve.get_replica_context().deployment
        others, *stages = await asyncio.gather(
            self._other_ingresses(ingress, own.replica),
            *(ask_all(handle, "metrics", WAIT_S) for handle in self._stages.values()),
        )
        answers = {ingress: [own, *others], **dict(zip(self._stages, stages, strict=True))}
        given = [
            metric for each in answers.values() for answer in each if answer is not None for metric in answer.metrics
        ]
        return text_of([*merged(given), missing({name: each.count(None) for name, each in answers.items()})])

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
    metric = GaugeMetricFamily(
        "omni_cluster_scrape_missing",
        "Replicas that did not answer in time, and whose samples are not in this scrape; 1 where none is known.",
        labels=["stage"],
    )
    for stage, count in by_stage.items():
        metric.add_metric([stage], count)
    return metric
