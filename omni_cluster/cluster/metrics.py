"""Metrics of replicas: on the page that Ray has for Prometheus on each node, and of all replicas in one answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.metrics import Counter, Gauge

from omni_cluster.cluster.transport import ask_all, known_replicas
from omni_cluster.engine.exposition import ReplicaMetrics, merged, missing, text_of
from omni_cluster.engine.metric_definitions import MetricDefinition
from omni_cluster.types.errors import OmniError

logger = logging.getLogger("ray.serve")

LENGTHS: Final = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]
"""vLLM counts tokens of requests in as many of these as its `max_model_len` has room for."""
PUSH_S: Final = 5.0
"""Ray sends what it was given each 10 s, and forgets a gauge that is 20 s old."""
WAIT_S: Final = 2.0
"""How long a replica may take to answer a scrape."""


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
        self._gauges = {
            each.name: Gauge(each.name, each.help, self._keys(each)) for each in defined if each.kind == "gauge"
        }
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


def engine_stat_logger() -> type:
    """What an engine's `AsyncLLM` counts by. Imports vLLM: only a stage's replica may, once it has that."""
    from vllm.v1.metrics.ray_wrappers import RayHistogramWrapper, RayPrometheusStatLogger

    class SameBuckets(RayHistogramWrapper):
        """Has the buckets of every engine: Ray has one set a node, and drops what comes in another."""

        def __init__(self, *, buckets: Sequence[float], **named: Any) -> None:
            is_of_lengths = list(buckets) == LENGTHS[: len(buckets)]
            super().__init__(buckets=LENGTHS if is_of_lengths else buckets, **named)

    class EngineStatLogger(RayPrometheusStatLogger):
        _histogram_cls = SameBuckets

    return EngineStatLogger


async def scraped(
    own: ReplicaMetrics, stages: Mapping[str, DeploymentHandle], ingresses: int, sleepers: Collection[str]
) -> bytes:
    """The metrics of all stages and ingresses in Prometheus' text format; `own`: of the ingress that is asked.

    A replica that does not answer within `WAIT_S` is left out, and counted: its samples are in a later scrape again,
    for they are counted where they are made. `sleepers`: stages that may have none.
    """
    ingress = serve.get_replica_context().deployment
    others, *answered = await asyncio.gather(
        _other_ingresses(ingress, own.replica, ingresses),
        *(_replicas_of(name, handle, may_sleep=name in sleepers) for name, handle in stages.items()),
    )
    answers = {ingress: [own, *others], **dict(zip(stages, answered, strict=True))}
    given = [metric for each in answers.values() for answer in each if answer is not None for metric in answer.metrics]
    return text_of([*merged(given), missing({name: each.count(None) for name, each in answers.items()})])


async def _replicas_of(name: str, handle: DeploymentHandle, *, may_sleep: bool) -> list[ReplicaMetrics | None]:
    answers = await ask_all(handle, "metrics", WAIT_S)
    return [] if may_sleep and not known_replicas(handle.app_name, name) else answers


async def _other_ingresses(ingress: str, own_replica: str, ingresses: int) -> list[ReplicaMetrics | None]:
    """What each of the others answers, None where it does not in time; a full one would not answer itself."""
    if ingresses == 1:
        return []
    handle = await asyncio.to_thread(serve.get_deployment_handle, ingress, serve.get_replica_context().app_name)
    answers = await ask_all(handle, "metrics", WAIT_S)
    others = [answer for answer in answers if answer is not None and answer.replica != own_replica]
    return [*others, *[None] * (len(answers) - 1 - len(others))]
