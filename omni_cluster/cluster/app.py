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
from omni_cluster.cluster.serve_private import RAY_SERVE_ENABLE_HA_PROXY, check_ray
from omni_cluster.cluster.stage_deployment import StageReplica
from omni_cluster.config.limits import Limits
from omni_cluster.config.loader import check_config, load_config
from omni_cluster.config.placement import PlacementConfig
from omni_cluster.config.plan import in_data_order, resolve_plan
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine.build import check_stages
from omni_cluster.engine.cards import stage_environment
from omni_cluster.models.registry import known_families
from omni_cluster.planning.policy import rule_of
from omni_cluster.server.answers import api_keys
from omni_cluster.server.refusals import RETRY_AFTER_S
from omni_cluster.types.errors import ConfigError

CALLS_PER_REQUEST = 2
"""What one request has open at a replica at most: `generate`, and `bring` while its media come."""
MAX_CONNECTIONS = 64
"""Replicas that read from one replica, ingresses included."""
CALLS_PER_CONNECTION = 3
"""What one of them has open at it at most: `rows`, the one that follows it, and `address` when it connects anew."""

STAGE_ROUTER = RequestRouterConfig(request_router_class="omni_cluster.cluster.routers.AddressRouter")
INGRESS_NAME = "ingress"
INGRESS_ROUTER = "omni_cluster.cluster.routers.IngressRouter"
MAX_INGRESS_CALLS = 65_536
"""What Serve lets into one ingress, probes and bodies that still come included; the ingress has its own limits."""
SHUTDOWN_MARGIN_S = 30.0
FRESH = {"metrics_interval_s": 2.0, "look_back_period_s": 5.0}
"""How often replicas report, and over what time their reports are averaged, for a policy that waits by itself. Serve's
own 10 and 30 s would come on top of its delays, and would still count requests that waited for a stage that slept when
it sleeps again."""
HEALTH_CHECK_PERIOD_S = 2.0
"""A replica that hangs ends itself, or its watchdog does: how soon Serve learns that and starts another."""


def config_of(args: Mapping[str, Any]) -> PipelineConfig:
    """What `config` describes: the path of a file, or what would be in it; without it, the default.

    Raises ConfigError.
    """
    unknown = sorted(set(args) - {"config"})
    if unknown:
        raise ConfigError(f"argument {unknown[0]!r} is unknown; use config=PATH.")
    given = args.get("config")
    if isinstance(given, Mapping):
        return check_config(given, "args.config", known_families=known_families())
    if given is not None and not isinstance(given, str):
        raise ConfigError(f"args.config is {given!r}; it should be a file's path, or a mapping as such a file has.")
    return load_config(Path(given) if given else None, known_families=known_families())


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
        # The ingress admits requests; those that it has admitted must not wait at a stage.
        max_ongoing_requests=CALLS_PER_REQUEST * limits.max_ongoing_requests + CALLS_PER_CONNECTION * MAX_CONNECTIONS,
        ray_actor_options=actor_options(stage),
        **bundles(stage),
        request_router_config=STAGE_ROUTER,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_timeout_s=limits.request_timeout_s + SHUTDOWN_MARGIN_S,
        **at_most_per_node(stage.placement),
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
        **ingress_router(limits),
        ray_actor_options={
            "num_cpus": 0.1,
            "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}},
            **node_options(config.ingress_placement),
        },
        **at_most_per_node(config.ingress_placement),
        graceful_shutdown_timeout_s=limits.request_timeout_s + SHUTDOWN_MARGIN_S,
    )


def ingress_router(limits: Limits) -> dict[str, Any]:
    """What chooses an ingress in Serve's own proxies, and bounds what clients leave unread there. HAProxy has neither:
    Serve refuses a router beside it.
    """
    if RAY_SERVE_ENABLE_HA_PROXY:
        return {}
    bounds = limits.model_dump(include={"max_unread_bytes", "max_unread_total_bytes"})
    router = RequestRouterConfig(request_router_class=INGRESS_ROUTER, request_router_kwargs=bounds)
    return {"request_router_config": router}


def actor_options(stage: StageConfig) -> dict[str, Any]:
    """Ray's resources of one replica; a stage without GPUs sees none."""
    resources = {
        "num_cpus": stage.num_cpus,
        "num_gpus": stage.scheduled_gpus,  # of exact cards Ray counts none, or it would choose others
        **node_options(stage.placement),
    }
    if stage.hosts_per_replica > 1:
        resources = {"num_cpus": 0}  # its bundles have them
    return {**resources, "runtime_env": {"env_vars": stage_environment(stage)}}


def bundles(stage: StageConfig) -> dict[str, Any]:
    """The placement group of a replica on several hosts: a bundle for each part of its model, the replica beside the
    first."""
    if stage.hosts_per_replica == 1:
        return {}
    placement, parts = stage.placement, stage.num_parts
    resources = {"CPU": stage.num_cpus / parts, **placement.resources}
    if stage.num_gpus:
        resources["GPU"] = 1.0
    if placement.accelerator_type is not None:
        resources[f"accelerator_type:{placement.accelerator_type}"] = 0.001
    return {
        "placement_group_bundles": [resources] * parts,
        "placement_group_strategy": "STRICT_SPREAD" if parts == stage.hosts_per_replica else "PACK",
        **({"placement_group_bundle_label_selector": [placement.label_selector]} if placement.label_selector else {}),
    }


def node_options(placement: PlacementConfig) -> dict[str, Any]:
    """Ray's options for the nodes."""
    return placement.model_dump(include={"label_selector", "accelerator_type", "resources"}, exclude_defaults=True)


def at_most_per_node(placement: PlacementConfig) -> dict[str, int]:
    """The deployment's bound, if there is one: a null would not be Serve's default."""
    return placement.model_dump(include={"max_replicas_per_node"}, exclude_none=True)


def scaling(stage: StageConfig) -> dict[str, Any]:
    if stage.autoscaling is None:
        return {"num_replicas": stage.max_replicas}
    scale = stage.autoscaling
    return {
        "autoscaling_config": ServeAutoscalingConfig(
            min_replicas=scale.min_replicas,
            max_replicas=scale.max_replicas,
            initial_replicas=scale.initial_replicas,
            # The policy waits by itself: for the most that was wanted, not for what is wanted last.
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=AutoscalingPolicy(policy_function=POLICY, policy_kwargs=rule_of(stage, scale)),
            **FRESH,
        )
    }
