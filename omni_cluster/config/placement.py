"""Where the replicas of a stage may run."""

from __future__ import annotations

import re
from typing import Final

from pydantic import Field, field_validator

from omni_cluster.config.problems import Problem, Strict, refuse


class PlacementConfig(Strict):
    """The nodes that a stage's replicas may run on; Ray spreads them over these."""

    label_selector: dict[str, str] = Field(
        default_factory=dict,
        description="Labels that a node must have, each with `value`, `!value`, `in(a, b)` or `!in(a, b)`.",
        examples=[{"role": "speech"}],
    )
    accelerator_type: str | None = Field(
        default=None,
        min_length=1,
        description="Ray's name of a card that a node must have, as `H200`.",
        examples=["H200"],
    )
    resources: dict[str, float] = Field(
        default_factory=dict,
        description="Custom resources of Ray that one replica takes of its node.",
        examples=[{"slot": 1}],
    )
    max_replicas_per_node: int | None = Field(
        default=None, ge=1, le=100, description="Replicas on one node at most.", examples=[2]
    )

    @field_validator("label_selector")
    @classmethod
    def _selects_labels(cls, selector: dict[str, str]) -> dict[str, str]:
        refuse([Problem(name, value, fix) for name, value in selector.items() if (fix := _label_fault(name, value))])
        return selector

    @field_validator("resources")
    @classmethod
    def _are_custom_amounts(cls, resources: dict[str, float]) -> dict[str, float]:
        refuse(
            [Problem(name, amount, fix) for name, amount in resources.items() if (fix := _amount_fault(name, amount))]
        )
        return resources


# Labels of nodes, as Ray has them, are those of Kubernetes:
# https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set
_LABEL: Final = "[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_SELECTED: Final = re.compile(rf"!?(?:{_LABEL}|in\({_LABEL}(?:, ?{_LABEL})*\))")
_MAX_PREFIX: Final = 253


def _label_fault(name: str, selected: str) -> str | None:
    prefix, _, bare = name.rpartition("/")
    parts = [bare, *prefix.split(".")] if "/" in name else [bare]
    if len(prefix) > _MAX_PREFIX or not all(re.fullmatch(_LABEL, part) for part in parts):
        return "a label's name is 63 letters, digits, - _ or . at most, as role"
    if not _SELECTED.fullmatch(selected):
        return "use a, !a, in(a, b) or !in(a, b)"
    return None


def _amount_fault(name: str, amount: float) -> str | None:
    if name in OWN_KEYS:
        return f"it has a key of its own, set {OWN_KEYS[name]} next to placement instead"
    if not amount > 0:
        return "it must be above 0, for example 1"
    if amount > 1 and not float(amount).is_integer():
        return f"above 1 it must be a whole number, for example {round(amount)}"
    return None


OWN_KEYS = {"CPU": "num_cpus", "GPU": "num_gpus", "num_cpus": "num_cpus", "num_gpus": "num_gpus"}
"""Resources that Ray counts by itself, and the keys of a stage that say how many it takes."""
