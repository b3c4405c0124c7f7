"""Metrics of several replicas as one text, in the form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from omni_cluster.engine.metric_definitions import MISSING

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class ReplicaMetrics:
    """What one replica, of a stage or of the ingress, counted so far and holds now."""

    replica: str
    metrics: list[Metric]

    @classmethod
    def of(cls, registry: Collector, replica: str, **labels: str) -> ReplicaMetrics:
        """All metrics of the registry; each sample gets `labels` and the replica's id.

        Leaves out the times at which counters were made: the text format would show each as a metric of its own.
        """
        metrics = list(registry.collect())
        for metric in metrics:
            kept = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            metric.samples = [
                sample._replace(labels={**sample.labels, **labels, "replica": replica}) for sample in kept
            ]
        return cls(replica, metrics)


def merged(metrics: Iterable[Metric]) -> list[Metric]:
    """Joins the metrics of one name: a scrape may contain each name only once."""
    by_name: dict[str, Metric] = {}
    for metric in metrics:
        if metric.name in by_name:
            by_name[metric.name].samples.extend(metric.samples)
        else:
            by_name[metric.name] = metric
    return list(by_name.values())


def missing(by_stage: Mapping[str, int]) -> Metric:
    """How many replicas of each stage gave no metrics."""
    metric = GaugeMetricFamily(MISSING.name, MISSING.help, labels=MISSING.labels)
    for stage, count in by_stage.items():
        metric.add_metric([stage], count)
    return metric


def text_of(metrics: Iterable[Metric]) -> bytes:
    """Prometheus' text format."""
    return generate_latest(_Collected(metrics))


class _Collected(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics
