"""The list of metrics is what the parts count by, and what the documentation says."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from omni_cluster.engine.metric_definitions import ALL, INGRESS, SCRAPE, STAGE, MetricDefinition
from omni_cluster.engine.metrics import StageMetrics
from omni_cluster.server.metrics import IngressMetrics

ROOT = Path(__file__).parents[2]
NOT_AT_ONCE = {"omni_cluster_ingress_places", "omni_cluster_ingress_upload_bytes"}
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
    assert each.help.endswith(".") or each in SCRAPE


def test_each_name_is_defined_once_and_has_its_row_in_the_documentation() -> None:
    names = [each.name for each in ALL]
    assert len(names) == len(set(names))
    page = (ROOT / "docs" / "operate" / "operations.md").read_text()
    rows = re.findall(r"^\| `(omni_cluster_\w+)` \| (\w+) \|", page, re.M)
    assert sorted(rows) == sorted((each.name, each.kind) for each in ALL)
