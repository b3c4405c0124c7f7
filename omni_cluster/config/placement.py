"""Where the replicas of a stage may run."""

from __future__ import annotations

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

    @field_validator("resources")
    @classmethod
    def _are_custom_amounts(cls, resources: dict[str, float]) -> dict[str, float]:
        refuse([Problem(name, amount, fix) for name, amount in resources.items() if (fix := _fault(name, amount))])
        return resources


def _fault(name: str, amount: float) -> str | None:
    if name in OWN_KEYS:
        return f"it has a key of its own, set {OWN_KEYS[name]} next to placement instead"
    if not amount > 0:
        return "it must be above 0, for example 1"
    if amount > 1 and not float(amount).is_integer():
        return f"above 1 it must be a whole number, for example {round(amount)}"
    return None


OWN_KEYS = {"CPU": "num_cpus", "GPU": "num_gpus", "num_cpus": "num_cpus", "num_gpus": "num_gpus"}
"""Resources that Ray counts by itself, and the keys of a stage that say how many it takes."""
