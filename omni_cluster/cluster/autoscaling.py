"""How many replicas a stage needs, by what its engines say rather than by the requests that Serve counts.

Every stage of a pipeline holds a request for its whole life, so Serve's count of ongoing requests is the same number
in all of them, and says nothing about any. `planning/policy.py` decides from the engines' figures; this module only
carries figures to it and replicas back.
"""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

from ray.serve.config import AutoscalingContext

from omni_cluster.config.schema import AutoscalingConfig, StageConfig
from omni_cluster.planning.policy import Decision, Sample, StageLoad, StageRule, decide

POLICY = "omni_cluster.cluster.autoscaling:DeploymentPolicy"
STAGE = "stage"
"""The name under which a policy decides for its one stage."""


class DeploymentPolicy:
    """Serve's policy of one stage; Serve makes it once, of the fields of its `StageRule`.

    What it remembers is lost with Serve's controller: then the stage waits its whole `down_after_s` again before it
    shrinks.
    """

    def __init__(self, **rule: float) -> None:
        self._rule = StageRule(**rule)  # type: ignore[arg-type]
        self._decision = Decision({})

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        before = Decision({STAGE: context.target_num_replicas}, self._decision.wishes)
        now_s = context.current_time or time.time()
        self._decision = decide({STAGE: self._rule}, before, now_s, {STAGE: load_of(context)})
        return self._decision.replicas[STAGE], {}


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
    places = stage.options.get("max_streams", stage.engine_args.get("max_num_seqs"))
    rule = {
        "min_replicas": scale.min_replicas,
        "max_replicas": scale.max_replicas,
        "max_streams": places,
        "up_after_s": scale.upscale_delay_s,
        "down_after_s": scale.downscale_delay_s,
        **scale.signals.model_dump(),
    }
    return {name: value for name, value in rule.items() if value is not None}
