"""Keys that most files set, and the rest under `advanced`: where each may stand, and what is said of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from omni_cluster.cli import main
from omni_cluster.config.loader import STAGE_CONFIGS, check_config
from omni_cluster.config.placement import PlacementConfig
from omni_cluster.config.schema import PipelineConfig
from omni_cluster.engine.build import check_stages
from omni_cluster.models.registry import known_families
from omni_cluster.types.errors import ConfigError
from tools.configuration_reference import public_keys, sections

SHIPPED = sorted(STAGE_CONFIGS.glob("*.yaml"))
MOST_PUBLIC = 25
CONTAINERS = {"stages", "stages[].options"}
"""Public keys that hold others."""


def given() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((STAGE_CONFIGS / "qwen2_5_omni_tiny.yaml").read_text())
    return config


def checked(config: dict[str, Any]) -> PipelineConfig:
    made = check_config(config, "my.yaml", known_families=known_families())
    check_stages(made)
    return made


def test_25_keys_are_public() -> None:
    assert len(set(public_keys()) - CONTAINERS) <= MOST_PUBLIC
    assert sum(len(section.model.model_fields) for section in sections()) > 3 * MOST_PUBLIC


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_has_each_key_in_its_place(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["check", str(path)]) == 0
    assert caplog.messages == []


def test_advanced_keys_are_read_in_each_section_and_stage() -> None:
    config = given()
    config["limits"]["max_queued_requests"] = 7
    config["advanced"] = {
        "limits": {"max_choices": 2},
        "decoders": {"processes": 3},
        "ingress_placement": {"label_selector": {"role": "front"}},
        "voices": ["Chelsie"],
    }
    talker, code2wav = config["stages"][1:]
    del talker["num_replicas"]
    talker["autoscaling"] = {"max_replicas": 2, "signals": {"max_requests": 9}}
    talker["advanced"]["autoscaling"] = {"upscale_delay_s": 1.0, "signals": {"max_kv_use": 0.5}}
    code2wav["advanced"]["options"]["max_pieces_at_once"] = 2
    made = checked(config)
    assert (made.limits.max_queued_requests, made.limits.max_choices, made.decoders.processes) == (7, 2, 3)
    assert made.ingress_placement.label_selector == {"role": "front"} and made.voices == ["Chelsie"]
    scale = made.stages[1].autoscaling
    assert scale is not None and scale.upscale_delay_s == 1.0
    assert (scale.signals.max_requests, scale.signals.max_kv_use) == (9, 0.5)
    assert made.stages[2].all_options["max_pieces_at_once"] == 2 and made.stages[2].options == {"dtype": "float32"}


def test_old_places_are_read_with_a_warning_that_names_the_new_one(caplog: pytest.LogCaptureFixture) -> None:
    config = given()
    config["limits"]["max_choices"] = 2
    config["decoders"] = {"processes": 3}
    config["stages"][2]["options"]["cuda_graphs"] = False
    made = checked(config)
    assert (made.limits.max_choices, made.decoders.processes) == (2, 3)
    assert made.stages[2].all_options["cuda_graphs"] is False
    assert caplog.messages == [
        "my.yaml: limits.max_choices (and 1 like it: decoders.processes) is read, but its place is "
        "advanced.limits.max_choices now.",
        "stages: stages[2].options.cuda_graphs is read, but its place is stages[2].advanced.options.cuda_graphs now.",
    ]


@pytest.mark.parametrize(
    ("top", "stage", "said"),
    [
        ({"limits": {"max_prompt_tokens": 9}}, {}, "advanced.limits.max_prompt_tokens is 9; it is a public key, set "
         "limits.max_prompt_tokens instead"),
        ({"stages": []}, {}, "advanced.stages is []; it is a public key, set stages instead"),
        ({}, {"num_gpus": 1}, "stages[2].advanced.num_gpus is 1; it is a public key, set stages[2].num_gpus instead"),
        ({}, {"options": {"dtype": "float32"}}, "stages[2].advanced.options.dtype is 'float32'; it is a public key, "
         "set stages[2].options.dtype instead"),
        ({"limits": {"max_choices": 65}}, {}, "advanced.limits.max_choices is 65; input should be less than or equal "
         "to 64, for example 4"),
        ({"limits": {"max_choises": 2}}, {}, "advanced.limits.max_choises is 2; no such key is known, did you mean "
         "max_choices"),
        ({"limit": {}}, {}, "advanced.limit is {}; no such key is known, did you mean limits"),
        ({"limits": {"max_upload_bytes": 1 << 20}}, {}, "advanced.limits.max_upload_bytes is 1048576; it must hold a "
         "body of max_body_bytes and 1 MiB"),
        ({}, {"stall_timeout_s": 0}, "stages[2].advanced.stall_timeout_s is 0; it must be above 0"),
        ({}, {"options": {"max_wait_ms": -1}}, "stages[2].advanced.options.max_wait_ms is -1; it must be at least 0"),
        ({}, {"options": 3}, "stages[2].advanced.options is 3; it must be a mapping"),
        ({}, {"placement": {"resources": {"GPU": 1.0}}}, "stages[2].advanced.placement.resources.GPU is 1.0; it has a "
         "key of its own"),
        ({}, {"placement": {"label_selector": {"role": "in(a"}}}, "stages[2].advanced.placement.label_selector.role is "
         "'in(a'; use a, !a, in(a, b) or !in(a, b)"),
        ({"ingress_placement": {"label_selector": {"ro le": "a"}}}, {}, "advanced.ingress_placement.label_selector.ro "
         "le is 'a'; a label's name is 63 letters, digits, - _ or . at most, as role"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_where_the_file_has_it(top: dict[str, Any], stage: dict[str, Any], said: str) -> None:
    config = given()
    config["advanced"] = top
    config["stages"][2]["advanced"] = stage
    with pytest.raises(ConfigError) as caught:
        checked(config)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "selector",
    [{"": "a"}, {"a" * 64: "a"}, {"/a": "a"}, {"a/": "a"}, {"a..b/c": "a"}, {"-a": "a"}, {"b" * 254 + "/a": "a"},
     {"a": ""}, {"a": "in()"}, {"a": "in(a b)"}, {"a": "!!a"}, {"a": "a" * 64}, {"a": "a\n"}, {"a\n": "a"}],
)  # fmt: skip
def test_what_is_no_label_is_refused(selector: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=r"as role|use a, !a"):
        PlacementConfig(label_selector=selector)


@pytest.mark.parametrize("wrong", [3, None, ["limits"], "limits"])
def test_advanced_is_a_mapping(wrong: object) -> None:
    for at, config in (("advanced", given()), ("stages[0].advanced", given())):
        (config if at == "advanced" else config["stages"][0])["advanced"] = wrong
        with pytest.raises(ConfigError, match="it must be a mapping") as caught:
            checked(config)
        assert f"{at} is " in str(caught.value)


def test_a_key_stands_at_one_of_its_places() -> None:
    config = given()
    config["limits"]["max_choices"], config["advanced"] = 2, {"limits": {"max_choices": 2}}
    with pytest.raises(ConfigError, match=r"advanced\.limits\.max_choices is 2; limits\.max_choices is set too"):
        checked(config)
    config = given()
    config["stages"][2]["options"]["max_wait_ms"] = 2
    config["stages"][2]["advanced"]["options"]["max_wait_ms"] = 2
    with pytest.raises(ConfigError, match=r"advanced\.options\.max_wait_ms is 2; .*\.options\.max_wait_ms is set too"):
        checked(config)


def test_a_plan_is_written_with_each_key_in_its_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, out = tmp_path / "my.yaml", tmp_path / "planned.yaml"
    config: dict[str, Any] = yaml.safe_load((STAGE_CONFIGS / "qwen2_5_omni_one_gpu.yaml").read_text())
    config["advanced"] = {"limits": {"max_choices": 2}, "voices": ["Chelsie"]}
    path.write_text(yaml.safe_dump(config))
    assert main(["plan", str(path), "--cards", "1", "--write", str(out)]) == 0
    assert main(["check", str(out)]) == 0 and caplog.messages == []
    written = yaml.safe_load(out.read_text())
    assert written["advanced"] == config["advanced"]
    assert [stage["advanced"] for stage in written["stages"]] == [stage["advanced"] for stage in config["stages"]]
