"""From a configuration to deployments: resources, replicas, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_cluster.cluster.app import actor_options, build_app, scaling
from omni_cluster.cluster.autoscaling import engine_load
from omni_cluster.config.schema import AutoscalingConfig, StageConfig
from omni_cluster.errors import ConfigError


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


def test_replicas_are_fixed_or_follow_the_engines_load() -> None:
    assert scaling(stage(num_replicas=3)) == {"num_replicas": 3}
    config = scaling(stage(autoscaling=AutoscalingConfig(max_replicas=4, target=6)))["autoscaling_config"]
    assert (config.min_replicas, config.max_replicas, config.get_target_ongoing_requests()) == (1, 4, 6)
    assert "replicas_for_load" in str(config.policy.policy_function)


def test_load_is_what_the_engine_works_on_and_not_what_waits_for_another_stage() -> None:
    assert engine_load({"running": 5, "waiting": 2, "held": 3}) == 4
    assert engine_load({"running": 1, "waiting": 2}) == 3


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
        build_app({"config": str(path)})


def test_an_unknown_argument_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'cfg' is unknown; use config=PATH"):
        build_app({"cfg": "x"})
