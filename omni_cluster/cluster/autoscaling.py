"""How many replicas a stage needs, by what its engines say rather than by the requests that Serve counts.

Every stage of a pipeline holds a request for its whole life, so Serve's count of ongoing requests is the same number
in all of them, and says nothing about any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingContext

POLICY = "omni_cluster.cluster.autoscaling:replicas_for_load"
LOAD = "load"


def engine_load(counts: Mapping[str, int]) -> float:
    """Requests that the engine works on or that wait for it; not those that wait for the stage before."""
    return float(counts["running"] + counts["waiting"] - counts.get("held", 0))


def replicas_for_load(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Serve's autoscaling policy: the stage's load over the load that a replica should have (`autoscaling.target`).

    Bounds, delays and smoothing are Serve's, from the same configuration.
    """
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    if not loads or context.config is None:
        return context.target_num_replicas, {}
    return sum(loads.values()) / context.config.get_target_ongoing_requests(), {}
