"""What a replica counts and holds, on the page that Ray has for Prometheus on each node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample
from ray.serve.metrics import Counter, Gauge

from omni_cluster.engine.metric_definitions import MetricDefinition
from omni_cluster.errors import OmniError

logger = logging.getLogger("ray.serve")

PUSH_S: Final = 5.0
"""Ray sends what it was given each 10 s, and forgets a gauge that is 20 s old."""


class RayMetrics:
    """The metrics of a registry as Ray's, with Serve's labels: deployment, replica and application.

    The buckets, sum and count of a histogram are counters there, for Ray's own histogram keeps no sum, and drops what
    another process of its node counts in other buckets. `labels`: what the samples have besides their own.
    """

    def __init__(
        self, registry: CollectorRegistry, definitions: Iterable[MetricDefinition], labels: Mapping[str, str]
    ) -> None:
        self._registry = registry
        self._labels = labels
        defined = tuple(definitions)
        self._gauges = {each.name: Gauge(each.name, each.help, self._keys(each)) for each in defined if is_gauge(each)}
        self._counters = dict(pair for each in defined for pair in self._counters_of(each))
        self._given: dict[tuple[str, ...], float] = {}

    def _keys(self, definition: MetricDefinition, *more: str) -> tuple[str, ...]:
        return (*self._labels, *definition.labels, *more)

    def _counters_of(self, of: MetricDefinition) -> Iterator[tuple[str, Counter]]:
        """By the name of their samples. Ray adds `_total`."""
        if of.kind == "counter":
            yield of.name, Counter(of.name.removesuffix("_total"), of.help, self._keys(of))
        elif of.kind == "histogram":
            yield f"{of.name}_bucket", Counter(f"{of.name}_bucket", of.help, self._keys(of, "le"))
            for part in ("sum", "count"):
                yield f"{of.name}_{part}", Counter(f"{of.name}_{part}", of.help, self._keys(of))

    def push(self) -> None:
        """Gives Ray what is held now, and what was counted since it was given last."""
        for metric in self._registry.collect():
            for sample in metric.samples:
                tags = {**self._labels, **sample.labels}
                if sample.name in self._gauges:
                    self._gauges[sample.name].set(sample.value, tags)
                elif sample.name in self._counters and (grown := self._growth(sample)) > 0:
                    self._counters[sample.name].inc(grown, tags)

    def _growth(self, sample: Sample) -> float:
        series = (sample.name, *sample.labels.values())
        before, self._given[series] = self._given.get(series, 0.0), sample.value
        return sample.value - before


def is_gauge(definition: MetricDefinition) -> bool:
    return definition.kind == "gauge"


async def pushed_in_turn(metrics: RayMetrics, refreshed: Callable[[], Awaitable[None]] | None = None) -> None:
    """Pushes until it is cancelled; before each, `refreshed` sees to it that the registry has what is held now.

    While an engine does not answer nothing is pushed. Whatever else breaks ends it, with a line in the log.
    """
    while True:
        try:
            if refreshed is not None:
                await refreshed()
            metrics.push()
        except (OmniError, TimeoutError) as error:
            logger.warning("the metrics were not given to Ray, which is tried again in %g s: %s", PUSH_S, error)
        except Exception:
            logger.exception("the metrics are given to Ray no more")
            raise
        await asyncio.sleep(PUSH_S)
