"""The reference of the metrics, as their definitions give it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omni_cluster.engine.metric_definitions import HANDOVER_SECONDS, INGRESS, SCRAPE, SECONDS, STAGE, MetricDefinition
from tools.tables import code, listed, table

_GROUPS: Sequence[tuple[str, Sequence[MetricDefinition], tuple[str, ...]]] = (
    ("Each replica of a stage", STAGE, ("stage", "replica")),
    ("Each ingress", INGRESS, ("replica",)),
    ("The scrape", SCRAPE, ()),
)
"""With the labels that each sample has beside its definition's."""
_BUCKETS: Mapping[tuple[float, ...], str] = {
    SECONDS: "all others",
    HANDOVER_SECONDS: "`omni_cluster_stage_handover_seconds`",
}


def metrics_reference() -> str:
    return "\n".join([*(_group(*group) for group in _GROUPS), _buckets()])


def _group(title: str, definitions: Sequence[MetricDefinition], common: tuple[str, ...]) -> str:
    rows = [(code(each.name), each.kind, listed((*each.labels, *common)), each.unit, each.help) for each in definitions]
    return f"## {title}\n\n{table(('metric', 'type', 'labels', 'unit', 'meaning'), rows)}\n"


def _buckets() -> str:
    """Raises KeyError for buckets that no line tells of."""
    used = dict.fromkeys(each.buckets for _, group, _ in _GROUPS for each in group if each.buckets)
    rows = [(_BUCKETS[bounds], ", ".join(f"{bound:g}" for bound in bounds)) for bounds in used]
    return f"## Buckets\n\n{table(('histogram', 'upper bounds in seconds'), rows)}\n"
