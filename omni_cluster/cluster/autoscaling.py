"""How many replicas a stage needs, by what its engines say rather than by the requests that Serve counts.

Every stage of a pipeline holds a request for its whole life, so Serve's count of ongoing requests is the same number
in all of them, and says nothing about any. `planning/policy.py` decides from the engines' figures; this module only
carries figures to it and replicas back.
"""

from __future__ import annotations

import time
from typing import Any

from ray.serve.config import AutoscalingContext

from omni_cluster.planning.policy import Decision, StageLoad, StageRule, decide

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
        load = StageLoad.of_signals(context.aggregated_metrics or {})
        self._decision = decide({STAGE: self._rule}, before, now_s, {STAGE: load})
        return self._decision.replicas[STAGE], {}
