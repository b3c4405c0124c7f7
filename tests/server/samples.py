"""Samples of a scrape, as tests compare them."""

from __future__ import annotations

from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

Totals = Counter[tuple[str, ...]]


def totals(text: str) -> Totals:
    """Every sample by its name and its labels' values, summed over replicas; buckets are left out."""
    sums: Totals = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" not in sample.labels:
                labels = [value for name, value in sorted(sample.labels.items()) if name != "replica"]
                sums[(sample.name.removeprefix("omni_cluster_"), *labels)] += sample.value  # type: ignore[assignment]
    return sums
