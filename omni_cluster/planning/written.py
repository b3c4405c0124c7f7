"""A plan as a stage configuration: the given one, with other replicas and shares."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from omni_cluster.config.advanced import split
from omni_cluster.config.autoscaling import SignalsConfig
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.planning.plan import ClusterPlan, StagePart
from omni_cluster.types.errors import ConfigError

PLACED_BY = (
    *("gpus", "num_gpus", "tensor_parallel_size", "pipeline_parallel_size", "hosts_per_replica"),
    *("autoscaling", "num_replicas", "standby_replicas", "card_priority"),
)
"""Keys of a stage that a plan decides: a replica that stands by would take a card that the plan does not count."""
RATE_OF_AN_INGRESS = 5.0
"""Requests a second: four ingresses were measured with twenty."""
MOST_INGRESSES = 64
ANSWER_OF_SOUND = 0.8
"""The part of an answer's seconds of sound until it is whole, on a card at its end: the p95 measured at 5 a second."""


def planned_config(config: PipelineConfig, plan: ClusterPlan, follows: bool = False) -> PipelineConfig:
    """`config` with the plan's replicas, or with `follows` up to so many, by the signals of the simulated day.

    Raises ConfigError for a stage that the plan does not know.
    """
    given = config.model_dump(mode="json", exclude_unset=True)
    parts = {part.name: part for part in plan.stages}
    stages = []
    for stage in given["stages"]:
        if stage["model_stage"] not in parts:
            raise ConfigError(f"stage {stage['model_stage']!r} was not measured; a plan is for {', '.join(parts)}.")
        part = parts[stage["model_stage"]]
        kept = {key: value for key, value in stage.items() if key not in PLACED_BY}
        stages.append({**kept, **_placed(part), **_replicas(part, plan, follows)})
    at_once = math.ceil(plan.most_streams * ANSWER_OF_SOUND)
    limits = {**given.get("limits", {}), "max_ongoing_requests": max(config.limits.max_ongoing_requests, at_once)}
    ingresses = min(MOST_INGRESSES, max(config.ingress_replicas, math.ceil(plan.rate_per_s / RATE_OF_AN_INGRESS)))
    return PipelineConfig.model_validate(
        {**given, "limits": limits, "ingress_replicas": ingresses, "stages": stages},
        context={"known_families": (config.family,)},
    )


def _placed(part: StagePart) -> dict[str, Any]:
    place: dict[str, Any] = {"gpus": list(part.cards)} if part.cards else {"num_gpus": part.gpus}
    return {**place, "card_priority": "low"} if part.goes_last else place


def _replicas(part: StagePart, plan: ClusterPlan, follows: bool) -> dict[str, Any]:
    if not follows or plan.layout == "together" or part.replicas == 1:
        return {"num_replicas": part.replicas}
    rule = plan.pipeline.rules({each.name: each.replicas for each in plan.stages})[part.name]
    signals = {name: getattr(rule, name) for name in SignalsConfig.model_fields}
    said = {name: float(f"{most:.3g}") for name, most in signals.items() if most is not None}
    return {"autoscaling": {"min_replicas": 1, "max_replicas": part.replicas, "signals": said}}


def write_config(path: Path, config: PipelineConfig, command: str) -> None:
    """Raises ConfigError for a file that is there or cannot be written."""
    given = config.model_dump(mode="json", exclude_unset=True)
    body: Any = split(given, PipelineConfig) | {"stages": [split(stage, StageConfig) for stage in given["stages"]]}
    head = f"# Written by: {command}\n# Which replicas meet on a card is Ray's choice where each takes a part of one.\n"
    try:
        with path.open("x") as file:
            file.write(head + yaml.safe_dump(body, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"--write {path}: the file cannot be written ({error.strerror}); name a new file.") from None
