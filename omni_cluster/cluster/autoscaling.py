"""How many replicas a stage needs, by what its engines say rather than by the requests that Serve counts.

Every stage of a pipeline holds a request for its whole life, so Serve's count of ongoing requests is the same number
in all of them, and says nothing about any. What is decided from the engines' figures is `planning/policy.py`'s where a
stage has `autoscaling.signals`; this module only carries figures to it and replicas back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from ray.serve.config import AutoscalingContext

from omni_cluster.config.schema import AutoscalingConfig, StageConfig
from omni_cluster.planning.policy import Decision, Ratio, Sample, StageLoad, StageRule, decide

POLICY = "omni_cluster.cluster.autoscaling:replicas_for_load"
SIGNALS_POLICY = "omni_cluster.cluster.autoscaling:DeploymentPolicy"
LOAD = "load"


def engine_load(counts: Mapping[str, float]) -> float:
    """Requests that the engine works on or that wait for it; not those that wait for the stage before."""
    return float(counts["running"] + counts["waiting"] - counts.get("held", 0))


def recorded(counts: Mapping[str, float], backlog_tokens: float, open_logs: int) -> dict[str, float]:
    """What a replica tells Serve: its load, and its sample by the names of the fields.

    `counts`: what its engine says; the others are fields of the `Sample`.
    """
    blocks = counts.get("kv_blocks", 0)
    sample = Sample(
        running=counts.get("streams", counts["running"]),  # a stream has several jobs
        waiting=max(0, counts["waiting"] - counts.get("held", 0)),
        kv_use=counts.get("kv_blocks_used", 0) / blocks if blocks else 0.0,
        backlog_tokens=backlog_tokens,
        slack_use=counts.get("slack_percent", 0) / 100,
        open_logs=open_logs,
    )
    return {LOAD: engine_load(counts), **asdict(sample)}


def replicas_for_load(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Serve's autoscaling policy: the stage's load over the load that a replica should have (`autoscaling.target`).

    Bounds, delays and smoothing are Serve's, from the same configuration.
    """
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    if not loads or context.config is None:
        return context.target_num_replicas, {}
    return sum(loads.values()) / context.config.get_target_ongoing_requests(), {}


class DeploymentPolicy:
    """Serve's policy of one stage with `autoscaling.signals`; Serve makes it once, of the fields of its `StageRule`."""

    def __init__(self, **rule: float) -> None:
        self._policy = ApplicationPolicy(stages={"": rule})

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        return self._policy.replicas({"": context})[""], {}


class ApplicationPolicy:
    """Serve's policy of a whole application: as `DeploymentPolicy`, and stages keep their ratios.

    A Serve configuration file names it as the application's `autoscaling_policy`. `stages`: the fields of each stage's
    `StageRule`, by name; `ratios`: those of each `Ratio`. What it remembers is lost with Serve's controller: then a
    stage waits its whole `down_after_s` again before it shrinks.
    """

    def __init__(
        self, stages: Mapping[str, Mapping[str, float]], ratios: Sequence[tuple[str, str, float]] = ()
    ) -> None:
        self._rules = {name: StageRule(**rule) for name, rule in stages.items()}  # type: ignore[arg-type]
        self._ratios = [Ratio(*ratio) for ratio in ratios]
        self._decision = Decision({})

    def __call__(self, contexts: Mapping[Any, AutoscalingContext]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
        ids = {context.deployment_name: deployment for deployment, context in contexts.items()}
        known = {name: contexts[ids[name]] for name in self._rules if name in ids}
        replicas = self.replicas(known)
        return {ids[name]: count for name, count in replicas.items()}, {}

    def replicas(self, contexts: Mapping[str, AutoscalingContext]) -> dict[str, int]:
        """Of the stages that Serve asks for."""
        before = Decision({name: c.target_num_replicas for name, c in contexts.items()}, self._decision.wishes)
        rules = {name: self._rules[name] for name in contexts}
        ratios = [r for r in self._ratios if r.feeder in rules and r.carrier in rules]
        loads = {name: load_of(context) for name, context in contexts.items()}
        now_s = next((c.current_time for c in contexts.values() if c.current_time), time.time())
        self._decision = decide(rules, ratios, before, now_s, loads)
        return self._decision.replicas


def load_of(context: AutoscalingContext) -> StageLoad:
    """Of the replicas that have reported. A stage that sleeps has none: Serve itself wakes it, for what it counts."""
    metrics = context.aggregated_metrics or {}
    names = [each.name for each in fields(Sample)]
    there = {replica for name in names for replica in metrics.get(name, {})}
    return StageLoad.of(
        Sample(**{name: metrics.get(name, {}).get(replica, 0.0) for name in names}) for replica in there
    )


def rule_of(stage: StageConfig, scale: AutoscalingConfig) -> dict[str, float]:
    """The fields of the stage's `StageRule` that its configuration says."""
    places = stage.diffusion.max_streams if stage.diffusion else stage.engine_args.get("max_num_seqs")
    rule = {
        "min_replicas": scale.min_replicas,
        "max_replicas": scale.max_replicas,
        "max_streams": places,
        "up_after_s": scale.upscale_delay_s,
        "down_after_s": scale.downscale_delay_s,
        **(scale.signals.model_dump() if scale.signals else {}),
    }
    return {name: value for name, value in rule.items() if value is not None}
