"""From a configuration to a Ray Serve application: one deployment a stage, and the ingress."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig as ServeAutoscalingConfig
from ray.serve.config import AutoscalingPolicy, BackpressureConfig, RequestRouterConfig

from omni_cluster.cluster.autoscaling import POLICY
from omni_cluster.cluster.ingress import Ingress
from omni_cluster.cluster.serve_private import check_ray
from omni_cluster.cluster.stage_deployment import StageReplica
from omni_cluster.cluster.transport import ROUTER
from omni_cluster.config.loader import load_config
from omni_cluster.config.plan import in_data_order, resolve_plan
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine.build import check_stages
from omni_cluster.engine.cards import stage_environment
from omni_cluster.errors import ConfigError
from omni_cluster.models.registry import known_families
from omni_cluster.server.answers import api_keys
from omni_cluster.server.door import RETRY_AFTER_S

CALLS_PER_REQUEST = 2
"""What one request has open at a replica at most: `generate`, and `bring` while its media come."""
MAX_CONNECTIONS = 64
"""Replicas that read from one replica, ingresses included."""
CALLS_PER_CONNECTION = 2
"""What one of them has open at it at most: `rows`, and `address` when it connects anew."""

INGRESS_NAME = "ingress"
INGRESS_ROUTER = "omni_cluster.cluster.ingress_router.IngressRouter"
MAX_INGRESS_CALLS = 65_536
"""What Serve lets into one ingress, probes and bodies that still come included; the ingress has its own limits."""
SHUTDOWN_MARGIN_S = 30.0
HEALTH_CHECK_PERIOD_S = 2.0
"""A replica that hangs ends itself, or its watchdog does: how soon Serve learns that and starts another."""


def build_app(args: Mapping[str, Any] | None = None) -> Application:
    """The application that `config=PATH` describes; without it, the embedded default. Raises ConfigError."""
    unknown = sorted(set(args or {}) - {"config"})
    if unknown:
        raise ConfigError(f"argument {unknown[0]!r} is unknown; use config=PATH.")
    path = (args or {}).get("config")
    return bind_app(load_config(Path(path) if path else None, known_families=known_families()))


def bind_app(config: PipelineConfig) -> Application:
    """One deployment a stage, bound to its source, and the ingress, bound to all. Raises ConfigError, VersionError."""
    check_ray()
    resolve_plan(config)
    check_stages(config)
    api_keys(config)
    stages: dict[int, Application] = {}
    for stage in in_data_order(config.stages):
        source = stages[stage.engine_input_source[0]] if stage.engine_input_source else None
        stages[stage.stage_id] = stage_deployment(stage, config).bind(stage.stage_id, config, source)
    names = {s.stage_id: s.model_stage for s in config.stages}
    return ingress_deployment(config).bind(config, {names[i]: app for i, app in stages.items()})


def stage_deployment(stage: StageConfig, config: PipelineConfig) -> Any:
    limits = config.limits
    return serve.deployment(
        StageReplica,
        name=stage.model_stage,
        # Admission is the ingress's; what it lets in must never wait at a stage's door.
        max_ongoing_requests=CALLS_PER_REQUEST * limits.max_ongoing_requests + CALLS_PER_CONNECTION * MAX_CONNECTIONS,
        ray_actor_options=actor_options(stage),
        request_router_config=ROUTER,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_timeout_s=limits.request_timeout_s + SHUTDOWN_MARGIN_S,
        **scaling(stage),
    )


def ingress_deployment(config: PipelineConfig) -> Any:
    limits = config.limits
    return serve.deployment(
        Ingress,
        name=INGRESS_NAME,
        num_replicas=config.ingress_replicas,
        max_ongoing_requests=MAX_INGRESS_CALLS,
        max_queued_requests=MAX_INGRESS_CALLS,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER_S),
        request_router_config=RequestRouterConfig(
            request_router_class=INGRESS_ROUTER,
            request_router_kwargs={
                "max_unread_bytes": limits.max_unread_bytes,
                "max_unread_total_bytes": limits.max_unread_total_bytes,
            },
        ),
        ray_actor_options={"num_cpus": 0.1, "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}},
        graceful_shutdown_timeout_s=limits.request_timeout_s + SHUTDOWN_MARGIN_S,
    )


def actor_options(stage: StageConfig) -> dict[str, Any]:
    """Ray's resources of one replica; a stage without GPUs sees none."""
    return {
        "num_cpus": stage.num_cpus,
        "num_gpus": stage.scheduled_gpus,  # of exact cards Ray counts none, or it would choose others
        "runtime_env": {"env_vars": stage_environment(stage)},
    }


def scaling(stage: StageConfig) -> dict[str, Any]:
    if stage.autoscaling is None:
        return {"num_replicas": stage.num_replicas}
    scale = stage.autoscaling
    return {
        "autoscaling_config": ServeAutoscalingConfig(
            min_replicas=scale.min_replicas,
            max_replicas=scale.max_replicas,
            initial_replicas=scale.initial_replicas,
            upscale_delay_s=scale.upscale_delay_s,
            downscale_delay_s=scale.downscale_delay_s,
            target_ongoing_requests=scale.target,
            policy=AutoscalingPolicy(policy_function=POLICY),
        )
    }
