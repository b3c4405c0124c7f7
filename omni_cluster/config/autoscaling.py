"""How many replicas of a stage there are, and what decides it."""

from __future__ import annotations

from pydantic import Field, model_validator

from omni_cluster.config.advanced import PUBLIC
from omni_cluster.config.problems import Problem, Strict, refuse


class SignalsConfig(Strict):
    """What one replica should carry, by what it says of itself: the signal that wants the most replicas decides."""

    max_requests: float | None = Field(
        default=None,
        gt=0,
        description="Requests that run in it, or wait for it and not for the stage before.",
        examples=[24],
        json_schema_extra=PUBLIC,
    )
    max_kv_use: float | None = Field(
        default=None, gt=0, le=1, description="The part of its KV cache in use.", examples=[0.7]
    )
    max_backlog_tokens: float | None = Field(
        default=None, gt=0, description="Tokens that its requests are still expected to make.", examples=[8_000]
    )
    max_slack_use: float | None = Field(
        default=None,
        gt=0,
        description="Players with less than a second of sound left, as a part of those that it could serve in time.",
        examples=[0.7],
    )

    @model_validator(mode="after")
    def _at_least_one(self) -> SignalsConfig:
        if not self.model_dump(exclude_none=True):
            refuse([Problem("max_requests", None, "name at least one signal, for example max_requests: 24")])
        return self


class AutoscalingConfig(Strict):
    """Replicas between two bounds, following the stage's own signals."""

    min_replicas: int = Field(
        default=1,
        ge=0,
        description="Replicas without load; 0: the stage sleeps until a request needs it.",
        examples=[1],
        json_schema_extra=PUBLIC,
    )
    max_replicas: int = Field(
        ge=1,
        description="Replicas at most.",
        examples=[4],
        json_schema_extra=PUBLIC,
    )
    initial_replicas: int | None = Field(
        default=None, ge=1, description="Replicas at the start; not set: `min_replicas`.", examples=[1]
    )
    upscale_delay_s: float = Field(
        default=10.0,
        ge=0,
        description="Seconds for which more replicas must be wanted before the stage grows.",
        examples=[10.0],
    )
    downscale_delay_s: float = Field(
        default=300.0,
        ge=0,
        description="Seconds for which fewer replicas must be wanted before the stage shrinks.",
        examples=[300.0],
    )
    signals: SignalsConfig = Field(
        description="What one replica should carry; one signal or more.", examples=[{"max_requests": 24}]
    )

    @model_validator(mode="after")
    def _bounds_in_order(self) -> AutoscalingConfig:
        low, high, start = self.min_replicas, self.max_replicas, self.initial_replicas
        problems = []
        if low > high:
            problems.append(Problem("min_replicas", low, f"it must be at most max_replicas, for example {high}"))
        elif start is not None and not low <= start <= high:
            fix = f"it must lie between min_replicas and max_replicas, for example {low}"
            problems.append(Problem("initial_replicas", start, fix))
        refuse(problems)
        return self
