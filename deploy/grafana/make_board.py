"""Makes `omni_cluster.json` beside it, a Grafana board, from the definitions of the metrics.

    python deploy/grafana/make_board.py

Its queries are of the names on the metrics port of Ray's nodes, so that it stands beside Ray's own boards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omni_cluster.engine import metric_definitions as define
from omni_cluster.engine.metric_definitions import MetricDefinition

BOARD = Path(__file__).with_name("omni_cluster.json")
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
RATE = "[$__rate_interval]"
OURS = 'application=~"$Application",ray_io_cluster=~"$Cluster"'
OF_CLUSTER = 'ray_io_cluster=~"$Cluster"'
SAMPLES_A_SECOND = 24_000
OF_GRAFANA = {"$__rate_interval": "30s", "$Application": ".*", "$Cluster": ".*"}
"""What stands for Grafana's variables where there is no Grafana."""
UNHEARD_S = 0.1
"""Players that stood still for less are counted as without a gap."""
WITHOUT_GAP = f',le="{UNHEARD_S:g}"'

KV_USE = MetricDefinition(
    "vllm_kv_cache_usage_perc", "gauge", "requests", "Part of an engine's KV cache that is in use.", ("model_name",)
)
PREEMPTIONS = MetricDefinition(
    "vllm_num_preemptions_total", "counter", "requests", "Requests that were preempted for others.", ("model_name",)
)


@dataclass(frozen=True)
class Query:
    """`legend`: Grafana's, with labels in double braces."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One graph. `unit`: as Grafana names it; `says`: what to look for."""

    title: str
    unit: Literal["s", "short", "bytes", "Bps", "percentunit", "reqps"]
    says: str
    queries: tuple[Query, ...]


# ------------------------------------------------------------------ expressions


def held(gauge: MetricDefinition, *, by: str = "stage, replica") -> str:
    return f"sum by ({by}) (ray_{gauge.name}{{{OURS}}})"


def rate(counter: MetricDefinition, *, by: str, only: str = "") -> str:
    return f"sum by ({by}) (rate(ray_{counter.name}{{{OURS}{only}}}{RATE}))"


def part_rate(
    histogram: MetricDefinition, part: Literal["bucket", "sum", "count"], *, by: str = "", only: str = ""
) -> str:
    """Ray has the parts of our histograms as counters."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate(ray_{histogram.name}_{part}_total{{{OURS}{only}}}{RATE}))"


def quantile(part: float, histogram: MetricDefinition, *, by: str = "") -> str:
    buckets = part_rate(histogram, "bucket", by=f"le, {by}" if by else "le")
    return f"histogram_quantile({part:g}, {buckets})"


def quantiles(histogram: MetricDefinition, *, by: str = "") -> tuple[Query, ...]:
    of = f"{{{{{by}}}}} " if by else ""
    return tuple(Query(quantile(part, histogram, by=by), f"{of}p{part * 100:g}") for part in (0.5, 0.95))


def or_none(expression: str) -> str:
    """What is not counted before it happens is shown as 0."""
    return f"{expression} or on() vector(0)"


def sound(by: str) -> str:
    """Seconds of sound a second."""
    return f"{rate(define.SAMPLES, by=by)} / {SAMPLES_A_SECOND}"


# ------------------------------------------------------------------ the board

HEARD = (
    Panel(
        "First audio",
        "s",
        "From a request's headers to a stream's first chunk of audio at the ingress.",
        quantiles(define.FIRST_AUDIO),
    ),
    Panel(
        "Streams without a gap",
        "percentunit",
        f"Streams with audio that ended, and whose players stalled for at most {UNHEARD_S:g} s in all.",
        (
            Query(
                f"({or_none(part_rate(define.STALL, 'bucket', only=WITHOUT_GAP))})"
                f" / ({part_rate(define.STALL, 'count')} > 0)",
                "without a gap",
            ),
        ),
    ),
    Panel("Stall", "s", "How long players of streams that ended stalled in all.", quantiles(define.STALL)),
    Panel(
        "RTF",
        "short",
        "Seconds that ended requests were in a stage, for a second of sound that it made: above 1 sound comes late.",
        (
            Query(
                f"{part_rate(define.REQUEST, 'sum', by='stage')} / ({sound('stage')} > 0)",
                "{{stage}}",
            ),
        ),
    ),
    Panel(
        "Voices",
        "short",
        "Seconds of sound made a second: as many streams are spoken at once.",
        (Query(f"{sound('stage, replica')} > 0", "{{stage}} {{replica}}"),),
    ),
    Panel(
        "Transfer",
        "s",
        "From a chunk's making to its arrival at the next stage.",
        quantiles(define.HANDOVER, by="stage"),
    ),
)

STAGES = (
    Panel(
        "First output",
        "s",
        "From a request's coming to a stage to its first output there, waiting for the stage before included.",
        quantiles(define.FIRST_OUTPUT, by="stage"),
    ),
    Panel(
        "Running",
        "short",
        "Requests that the engine works on.",
        (Query(held(define.RUNNING), "{{stage}} {{replica}}"),),
    ),
    Panel(
        "Queue",
        "short",
        "Requests that wait for the engine: where they grow, the stage wants another replica.",
        (Query(held(define.WAITING), "{{stage}} {{replica}}"),),
    ),
    Panel(
        "Held",
        "short",
        "Requests whose next step waits for hidden states of the stage before: where all are, that stage is too slow.",
        (Query(held(define.HELD), "{{stage}} {{replica}}"),),
    ),
    Panel(
        "Held bytes",
        "bytes",
        "Hidden states and audio kept or being sent; at limits.replica_outbox_max_bytes new requests wait.",
        (Query(held(define.HELD_BYTES), "{{stage}} {{replica}}"),),
    ),
    Panel(
        "KV use",
        "percentunit",
        KV_USE.help,
        (
            Query(
                f"max by (model_name, ReplicaId) (ray_{KV_USE.name}{{{OF_CLUSTER}}})",
                "{{model_name}} {{ReplicaId}}",
            ),
        ),
    ),
    Panel(
        "Tokens",
        "short",
        "Tokens made a second.",
        (Query(rate(define.TOKENS, by="stage, replica"), "{{stage}} {{replica}}"),),
    ),
    Panel(
        "Ended",
        "reqps",
        "Requests by how they ended in a stage.",
        (Query(rate(define.REQUESTS, by="stage, outcome"), "{{stage}} {{outcome}}"),),
    ),
    Panel(
        "Preemptions",
        "reqps",
        "Requests that an engine put off for want of KV cache.",
        (
            Query(
                or_none(f"sum by (model_name) (rate(ray_{PREEMPTIONS.name}{{{OF_CLUSTER}}}{RATE}))"), "{{model_name}}"
            ),
        ),
    ),
)

INGRESSES = (
    Panel(
        "Requests",
        "reqps",
        "Requests that ended, by HTTP status; 499: the client left.",
        (Query(rate(define.INGRESS_REQUESTS, by="endpoint, status"), "{{endpoint}} {{status}}"),),
    ),
    Panel(
        "Refusals",
        "reqps",
        "Answers with an error, by the code that the client reads; `/ready` says 503 as long as a start takes.",
        (Query(or_none(rate(define.REFUSALS, by="reason", only=',endpoint!="/ready"')), "{{reason}}"),),
    ),
    Panel(
        "Recoveries",
        "reqps",
        "Requests that went on although a replica was lost, by its stage.",
        (Query(or_none(rate(define.RECOVERED, by="stage")), "{{stage}}"),),
    ),
    Panel(
        "Recovery stall",
        "s",
        "From a replica's loss to what its requests say next.",
        (Query(or_none(quantile(0.95, define.RECOVERY_STALL)), "p95"),),
    ),
    Panel(
        "Slots",
        "short",
        "Requests that are worked on, and that wait for that.",
        (Query(held(define.PLACES, by="state, replica"), "{{state}} {{replica}}"),),
    ),
    Panel("Answer", "s", "Until the end of a whole answer.", quantiles(define.ANSWER, by="endpoint")),
    Panel(
        "Uploads",
        "bytes",
        "Bytes of bodies that are not worked on yet.",
        (Query(held(define.UPLOAD_BYTES, by="replica"), "{{replica}}"),),
    ),
    Panel(
        "Sent",
        "Bps",
        "Bytes of answers' bodies.",
        (Query(rate(define.SENT_BYTES, by="endpoint"), "{{endpoint}}"),),
    ),
)

ROWS = {"What clients hear": HEARD, "Stages": STAGES, "Ingress": INGRESSES}
PANELS = tuple(panel for panels in ROWS.values() for panel in panels)


# ------------------------------------------------------------------ as Grafana reads it


def board() -> dict[str, Any]:
    return {
        "title": "omni_cluster",
        "uid": "omniCluster",
        "tags": ["omni_cluster", "ray"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": variables()},
        "panels": list(laid_out()),
    }


def variables() -> list[dict[str, Any]]:
    """Ray's names for them: a link from one of its boards keeps what was chosen there."""
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "hide": 2, "refresh": 1}
    running = f"ray_{define.RUNNING.name}"
    return [
        source,
        chosen("Cluster", "label_values(ray_node_network_receive_speed, ray_io_cluster)"),
        chosen("Application", f"label_values({running}{{{OF_CLUSTER}}}, application)"),
    ]


def chosen(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": "${datasource}",
        "definition": query,
        "query": {"query": query, "refId": name},
        "allValue": ".*",
        "includeAll": True,
        "multi": False,
        "current": {"selected": True, "text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
    }


def laid_out() -> Iterator[dict[str, Any]]:
    y, number = 0, 0
    for title, panels in ROWS.items():
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": place(0, y, 24, 1),
        }
        y += 1
        for at, panel in enumerate(panels):
            number += 1
            x = at % COLUMNS * WIDTH
            yield graph(panel, number) | {"gridPos": place(x, y + at // COLUMNS * HEIGHT, WIDTH, HEIGHT)}
        y += -(-len(panels) // COLUMNS) * HEIGHT


def place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def graph(panel: Panel, number: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.says,
        "datasource": "${datasource}",
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "table", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": list(targets(panel.queries)),
    }


def targets(queries: Iterable[Query]) -> Iterator[dict[str, str]]:
    for ref, query in zip("ABCD", queries, strict=False):
        yield {"refId": ref, "expr": query.expression, "legendFormat": query.legend, "datasource": "${datasource}"}


def sent(expression: str) -> str:
    """The expression as Grafana would send it, of all applications and clusters."""
    for variable, value in OF_GRAFANA.items():
        expression = expression.replace(variable, value)
    return expression


def text() -> str:
    return json.dumps(board(), indent=1) + "\n"


if __name__ == "__main__":
    BOARD.write_text(text())
