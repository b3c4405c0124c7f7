"""The list of metrics is what the parts count by."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry

from omni_cluster.engine.metric_definitions import ALL, INGRESS, STAGE, MetricDefinition
from omni_cluster.engine.metrics import StageMetrics
from omni_cluster.server.metrics import IngressMetrics

NOT_AT_ONCE = {f"omni_cluster_ingress_{name}" for name in ("places", "sessions", "upload_bytes")}
"""What an ingress counts once it has a door."""


def collected(registry: CollectorRegistry) -> set[tuple[str, str, str]]:
    return {(metric.name, metric.type, metric.documentation) for metric in registry.collect()}


def defined(definitions: Iterable[MetricDefinition]) -> set[tuple[str, str, str]]:
    return {(each.name.removesuffix("_total"), each.kind, each.help) for each in definitions}


def test_a_stage_and_an_ingress_count_what_is_defined() -> None:
    assert collected(StageMetrics().registry) == defined(STAGE)
    assert collected(IngressMetrics().registry) == defined(each for each in INGRESS if each.name not in NOT_AT_ONCE)


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.name)
def test_a_definition_is_as_prometheus_names_metrics(each: MetricDefinition) -> None:
    assert each.name.endswith("_total") == (each.kind == "counter")
    assert each.name.removesuffix("_total").endswith(f"_{each.unit}") or each.unit not in ("bytes", "seconds")
    assert bool(each.buckets) == (each.kind == "histogram")
    assert list(each.buckets) == sorted(each.buckets) and all(bound > 0 for bound in each.buckets)
    assert each.help.endswith(".")


def test_each_name_is_defined_once() -> None:
    names = [each.name for each in ALL]
    assert len(names) == len(set(names))
