"""What a server's `/metrics` say, and what two of them say of the time between."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from omni_cluster.engine import metric_definitions as define
from omni_cluster.engine.metric_definitions import MetricDefinition

Labels = tuple[tuple[str, str], ...]
STALLED_S: Final = 0.05
"""A stream whose player waited no longer is counted as one without a stall; a bound of the histogram."""


@dataclass(frozen=True)
class Scrape:
    """One scrape: values by the sample's name and labels."""

    samples: Mapping[str, Mapping[Labels, float]]

    @classmethod
    def of(cls, text: str) -> Scrape:
        """Raises ValueError for what is no text of Prometheus."""
        samples: dict[str, dict[Labels, float]] = defaultdict(dict)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
        return cls(samples)

    @property
    def at_s(self) -> float:
        return self.total(define.SCRAPED_AT.name)

    def total(self, name: str, **labels: str) -> float:
        """Summed over all that have these labels."""
        return sum(value for _, value in self.each(name, **labels))

    def each(self, name: str, **labels: str) -> Iterator[tuple[Labels, float]]:
        wanted = set(labels.items())
        for having, value in self.samples.get(name, {}).items():
            if wanted <= set(having):
                yield having, value

    def values(self, definition: MetricDefinition, label: str) -> list[str]:
        """Of a label, in the order of the scrape."""
        named = self.samples.get(_plain(definition), {})
        return list(dict.fromkeys(dict(labels).get(label, "") for labels in named))

    def replicas(self, stage: str) -> int:
        named = self.each(define.RUNNING.name, stage=stage)
        return len({dict(labels).get("replica") for labels, _ in named})


def _plain(definition: MetricDefinition) -> str:
    return f"{definition.name}_count" if definition.kind == "histogram" else definition.name


@dataclass(frozen=True)
class Span:
    """Two scrapes; the second may be the first's copy, of which no rate is known."""

    before: Scrape
    now: Scrape

    @property
    def seconds(self) -> float:
        return self.now.at_s - self.before.at_s

    def rate(self, name: str, **labels: str) -> float | None:
        """What a counter grew in a second, replica by replica: one that is new began at nothing."""
        if self.seconds <= 0:
            return None
        earlier = self.before.samples.get(name, {})
        grown = (max(0.0, value - earlier.get(having, 0.0)) for having, value in self.now.each(name, **labels))
        return sum(grown) / self.seconds
