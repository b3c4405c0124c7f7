"""From a configuration to deployments: resources, replicas, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray._private.label_utils import validate_label_selector
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import DeploymentID
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingContext

from omni_cluster.cluster import app
from omni_cluster.cluster.app import (
    actor_options,
    bind_app,
    bundles,
    config_of,
    ingress_router,
    scaling,
    stage_deployment,
)
from omni_cluster.cluster.autoscaling import DeploymentPolicy
from omni_cluster.config.autoscaling import AutoscalingConfig, SignalsConfig
from omni_cluster.config.loader import DEFAULT_CONFIG, load_config
from omni_cluster.config.schema import StageConfig
from omni_cluster.models.registry import known_families
from omni_cluster.types.errors import ConfigError
from tests.configs import TINY_CONFIG


def stage(**fields: object) -> StageConfig:
    return StageConfig(**{"stage_id": 0, "model_stage": "thinker", "num_gpus": 0, **fields})  # type: ignore[arg-type]


def test_a_stage_without_gpus_sees_none() -> None:
    options = actor_options(stage(num_cpus=0.5))
    assert (options["num_cpus"], options["num_gpus"]) == (0.5, 0)
    assert options["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] == ""


def test_ray_chooses_the_cards_of_a_share_or_a_number() -> None:
    for share, parallel in ((0.25, 1), (1, 1), (2, 2)):
        options = actor_options(stage(num_gpus=share, tensor_parallel_size=parallel))
        assert options["num_gpus"] == share
        assert "CUDA_VISIBLE_DEVICES" not in options["runtime_env"]["env_vars"]


def test_pinned_cards_are_seen_exactly_and_not_counted_by_ray() -> None:
    options = actor_options(stage(num_gpus=None, gpus=[3, 1], tensor_parallel_size=2))
    assert options["num_gpus"] == 0
    assert options["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] == "3,1"


def test_a_replica_is_placed_by_labels_cards_and_resources() -> None:
    placement = {
        "label_selector": {"stage": "in(talker, sound)"},
        "accelerator_type": "H200",
        "resources": {"slot": 0.5},
        "max_replicas_per_node": 2,
    }
    config = load_config(TINY_CONFIG, known_families=known_families())
    deployment = stage_deployment(stage(num_gpus=1, placement=placement), config)
    options = deployment.ray_actor_options
    assert {key: options[key] for key in ("label_selector", "accelerator_type")} == {
        key: placement[key] for key in ("label_selector", "accelerator_type")
    }
    assert options["resources"]["slot"] == 0.5
    assert deployment._deployment_config.max_ongoing_requests and deployment._replica_config.max_replicas_per_node == 2


@pytest.mark.parametrize("name", ["role", "a", "ray.io/market-type", "a.b-c/d_e.f", "9" * 63])
@pytest.mark.parametrize("selected", ["speech", "!speech", "in(a)", "in(a, b)", "!in(a,b-c)", "9" * 63, "a.b_c"])
def test_labels_that_a_configuration_may_name_are_labels_of_ray(name: str, selected: str) -> None:
    placement = {"label_selector": {name: selected}}
    assert validate_label_selector(actor_options(stage(placement=placement))["label_selector"]) is None


def test_serves_own_router_is_left_out_where_haproxy_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = load_config(TINY_CONFIG, known_families=known_families()).limits
    assert ingress_router(limits)["request_router_config"].request_router_kwargs["max_unread_bytes"]
    monkeypatch.setattr(app, "RAY_SERVE_ENABLE_HA_PROXY", True)
    assert ingress_router(limits) == {}


def test_a_replica_on_several_hosts_has_a_bundle_for_each_part() -> None:
    placement = {"label_selector": {"rack": "a"}, "accelerator_type": "H200", "resources": {"slot": 1}}
    split = stage(
        num_gpus=4, num_cpus=2, tensor_parallel_size=2, pipeline_parallel_size=2, hosts_per_replica=2,
        placement=placement, engine_args={"kv_cache_memory_bytes": 1 << 30},
    )  # fmt: skip
    replica = stage_deployment(split, load_config(TINY_CONFIG, known_families=known_families()))._replica_config
    bundle = {"CPU": 0.5, "GPU": 1.0, "slot": 1, "accelerator_type:H200": 0.001}
    assert replica.placement_group_bundles == [bundle] * 4
    assert replica.placement_group_strategy == "PACK"
    assert replica.placement_group_bundle_label_selector == [{"rack": "a"}] * 4
    assert actor_options(split)["num_cpus"] == 0 and "num_gpus" not in actor_options(split)
    spread = stage(tensor_parallel_size=2, hosts_per_replica=2)
    assert bundles(spread)["placement_group_strategy"] == "STRICT_SPREAD"
    assert bundles(stage(tensor_parallel_size=2)) == {}


@pytest.mark.parametrize(
    ("resources", "fix"),
    [
        ({"GPU": 1}, "set num_gpus next to placement"),
        ({"CPU": 1}, "set num_cpus next to placement"),
        ({"slot": 0}, "above 0, for example 1"),
        ({"slot": 1.5}, "a whole number, for example 2"),
    ],
)
def test_a_resource_that_a_replica_cannot_take_is_refused(resources: dict[str, float], fix: str) -> None:
    with pytest.raises(ValidationError, match=fix):
        stage(placement={"resources": resources})


def test_replicas_are_fixed_or_follow_the_engines() -> None:
    assert scaling(stage(num_replicas=3)) == {"num_replicas": 3}
    scale = AutoscalingConfig(max_replicas=4, signals=SignalsConfig(max_requests=6))
    config = scaling(stage(autoscaling=scale))["autoscaling_config"]
    assert (config.min_replicas, config.max_replicas) == (1, 4)


def test_a_stage_waits_by_its_policy_and_not_by_serve() -> None:
    scale = AutoscalingConfig(max_replicas=4, upscale_delay_s=5, signals=SignalsConfig(max_requests=24))
    config = scaling(stage(autoscaling=scale, engine_args={"max_num_seqs": 64}))["autoscaling_config"]
    assert (config.upscale_delay_s, config.downscale_delay_s) == (0, 0)
    assert config.policy.policy_kwargs == {
        "min_replicas": 1, "max_replicas": 4, "max_streams": 64, "up_after_s": 5, "down_after_s": 300,
        "max_requests": 24,
    }  # fmt: skip
    assert isinstance(_resolve_policy_callable(config.policy), DeploymentPolicy)


def context(
    name: str, at_s: float = 1_000.0, target: int = 1, current: int = 1, requests: float = 0, **signals: float
) -> AutoscalingContext:
    return AutoscalingContext(
        deployment_id=DeploymentID(name=name, app_name="default"), deployment_name=name, app_name="default",
        current_num_replicas=current, target_num_replicas=target, running_replicas=[], total_num_requests=requests,
        total_queued_requests=0, aggregated_metrics={signal: {"r1": value} for signal, value in signals.items()},
        raw_metrics={}, capacity_adjusted_min_replicas=0, capacity_adjusted_max_replicas=9, policy_state={},
        last_scale_up_time=None, last_scale_down_time=None, current_time=at_s, config=None,
    )  # fmt: skip


def test_the_policy_of_a_deployment_follows_what_its_replicas_say() -> None:
    policy = DeploymentPolicy(max_replicas=8, max_requests=10, up_after_s=5, down_after_s=60, spare=0.0)
    asked = [(0, 1, 40), (3, 1, 40), (6, 1, 40), (9, 4, 5), (60, 4, 5), (70, 4, 5)]
    seen = [policy(context("a", 1_000 + at, target, running=busy, waiting=0))[0] for at, target, busy in asked]
    assert seen == [1, 1, 4, 4, 4, 1]


def test_a_stage_sleeps_until_serve_counts_a_request_and_one_that_starts_stays() -> None:
    signals = SignalsConfig(max_requests=10)
    scale = AutoscalingConfig(min_replicas=0, max_replicas=8, downscale_delay_s=20, signals=signals)
    config = scaling(stage(autoscaling=scale))["autoscaling_config"]
    assert (config.min_replicas, config.metrics_interval_s, config.look_back_period_s) == (0, 2, 5)
    policy = _apply_autoscaling_config(_resolve_policy_callable(config.policy))

    def asked(at_s: float, **seen: Any) -> int:
        of = context("a", 1_000 + at_s, **seen)
        of.config = config
        return policy(of)[0]

    idle = {"running": 0, "waiting": 0, "open_logs": 0}
    assert [asked(0, **idle), asked(20, **idle)] == [1, 0]
    assert [asked(21, target=0, current=0), asked(22, target=0, current=0, requests=15)] == [0, 1]
    assert [asked(23, target=1, current=0), asked(60, target=1, current=1, **idle)] == [1, 1]
    assert [asked(90, **idle | {"open_logs": 1}), asked(100, **idle), asked(130, **idle)] == [1, 1, 0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: preset:tiny\nfamily: nobody\nstages: []", "qwen2_5_omni"),
        ("model: preset:tiny\nfamily: qwen2_5_omni\nstages: [{stage_id: 0, model_stage: singer, num_gpus: 0, "
         "final_output_type: text}]", "singer"),
    ],
)  # fmt: skip
def test_a_bad_configuration_builds_nothing(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        bind_app(config_of({"config": str(path)}))


def test_an_unknown_argument_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'cfg' is unknown; use config=PATH"):
        bind_app(config_of({"cfg": "x"}))


def test_a_configuration_may_stand_in_the_arguments() -> None:
    given = yaml.safe_load(DEFAULT_CONFIG.read_text())
    assert config_of({"config": given}) == config_of({"config": str(DEFAULT_CONFIG)}) == config_of({})
    for wrong in (3, ["a.yaml"]):
        with pytest.raises(ConfigError, match=r"^args\.config is .*; it should be a file's path"):
            bind_app(config_of({"config": wrong}))
    given["stages"][1]["advanced"]["num_cpus"] = -1
    with pytest.raises(ConfigError, match=r"^args\.config: stages\[1\]\.advanced\.num_cpus is -1; "):
        bind_app(config_of({"config": given}))
