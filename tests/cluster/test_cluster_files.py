"""The cluster files by Ray's own schema, and what the page of clusters says of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private.label_utils import parse_node_labels_string
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve._private import constants

from omni_cluster.config.loader import load_config
from omni_cluster.models.registry import known_families
from tests.cluster.image_files import ROOT, built_from
from tests.commands import IMAGE, parse, simple_commands

CLUSTER_FILES = ("ray_cluster.yaml", "deploy/ray_cluster_aws.yaml")
PAGE = ROOT / "docs/operate/clusters.md"
HOME = "~/omni_cluster/"
FIRST_AUTOSCALER = "RAY_enable_autoscaler_v2=0 "
"""The second one starts no workers on an operator's own machines."""


def cluster(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / name).read_text())  # type: ignore[no-any-return]


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    """As `ray up` fills and checks it before it reaches for a machine. Raises what Ray raises."""
    full: dict[str, Any] = prepare_config(config)
    validate_config(full)
    return full


def all_commands(config: dict[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        if key.endswith("_commands"):
            yield from value


@pytest.mark.parametrize("name", CLUSTER_FILES)
def test_ray_accepts_the_cluster_file(name: str) -> None:
    full = prepared(cluster(name))
    assert full["head_node_type"] in full["available_node_types"]


def test_ray_refuses_a_cluster_file_that_is_wrong() -> None:
    with pytest.raises(Exception, match="Additional properties are not allowed"):
        prepared(cluster(CLUSTER_FILES[1]) | {"dashboard": True})
    with pytest.raises(ValueError, match="`max_workers` is smaller"):
        prepared(cluster(CLUSTER_FILES[1]) | {"max_workers": 1})


def test_all_machines_of_the_on_premise_file_are_workers() -> None:
    full = prepared(cluster("ray_cluster.yaml"))
    machines = len(full["provider"]["worker_ips"])
    assert [(t["min_workers"], t["max_workers"]) for t in full["available_node_types"].values()] == [
        (machines, machines)
    ]


def test_the_cloud_file_starts_the_cards_that_the_stages_ask_for() -> None:
    full = prepared(cluster("deploy/ray_cluster_aws.yaml"))
    types = full["available_node_types"]
    assert types[full["head_node_type"]]["resources"]["GPU"] == 0
    cards = sum(kind["min_workers"] * kind["resources"].get("GPU", 0) for kind in types.values())
    stages = load_config(ROOT / "stage_configs/qwen2_5_omni.yaml", known_families=known_families()).stages
    assert cards == sum((stage.num_gpus or 0) * stage.num_replicas for stage in stages)
    assert {stage.model_stage for stage in stages} == {
        kind["labels"]["stage"] for kind in types.values() if "labels" in kind
    }


@pytest.mark.parametrize("name", CLUSTER_FILES)
def test_what_the_package_is_built_from_is_copied_to_the_machines(name: str) -> None:
    mounts = cluster(name)["file_mounts"]
    here = {local for remote, local in mounts.items() if remote == HOME + local}
    assert sorted(here) == sorted(local for local in here if (ROOT / local).exists())
    assert set(mounts.values()) - here == {"~/.ray/auth_token"}
    assert built_from() <= here


@pytest.mark.parametrize("name", CLUSTER_FILES)
def test_the_nodes_commands_are_such_as_the_shell_and_ray_know(name: str) -> None:
    commands = list(all_commands(cluster(name)))
    assert any("ray start --head" in command for command in commands)
    for command in commands:
        subprocess.run(["bash", "-n", "-c", command], check=True)
        for simple in simple_commands(command):
            parse(simple)


@pytest.mark.parametrize("written", [None, "role=speech,example.com/hall=hall-1"])
@pytest.mark.parametrize("key", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_a_machines_labels_are_those_of_its_file(key: str, written: str | None, tmp_path: Path) -> None:
    """The command itself, with a `ray` that only tells how it was called."""
    (tmp_path / "omni_cluster" / "deploy").mkdir(parents=True)
    (tmp_path / "omni_cluster" / "deploy" / "node.sh").write_text('ray() { printf "%s\\n" "$@"; }\n')
    if written is not None:
        (tmp_path / "ray_labels").write_text(written + "\n")
    *_, start = cluster("ray_cluster.yaml")[key]
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "RAY_HEAD_IP": "192.0.2.1"}
    told = subprocess.run(["bash", "-euc", start], env=environment, check=True, capture_output=True, text=True).stdout
    (labels,) = [line.removeprefix("--labels=") for line in told.splitlines() if line.startswith("--labels=")]
    expected = {"role": "speech", "example.com/hall": "hall-1"} if written else {}
    assert parse_node_labels_string(labels) == expected


def test_both_files_start_ray_alike_but_for_its_autoscaler() -> None:
    first, second = map(cluster, CLUSTER_FILES)
    assert first["head_start_ray_commands"][1].count(FIRST_AUTOSCALER) == 1
    first["head_start_ray_commands"][1] = first["head_start_ray_commands"][1].replace(FIRST_AUTOSCALER, "")
    for key in ("file_mounts", "rsync_exclude", "head_start_ray_commands", "worker_start_ray_commands"):
        assert first[key] == second[key]


def test_a_nodes_environment_is_set_by_its_script(tmp_path: Path) -> None:
    script = f". {ROOT / 'deploy/node.sh'} && env"
    clean = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    printed = subprocess.run(["bash", "-euc", script], env=clean, check=True, capture_output=True, text=True).stdout
    found = dict(line.split("=", 1) for line in printed.splitlines())
    assert found["PATH"].startswith(f"{tmp_path}/omni_cluster/.venv/bin:")
    assert found["RAY_AUTH_MODE"] == "token"
    makefile = dict(re.findall(r"^export (\w+) \??:= (\S+)$", (ROOT / "Makefile").read_text(), flags=re.M))
    shared = [key for key in makefile if key.startswith(("RAY_", "VLLM_LOGGING"))]
    assert shared
    assert {key: found[key] for key in shared} == {key: makefile[key] for key in shared}


def test_the_page_makes_the_secrets_that_the_pods_ask_for() -> None:
    service = (ROOT / "deploy/kuberay/rayservice.yaml").read_text()
    made = re.findall(r"create secret generic (\S+) --from-literal=(\w+)=", PAGE.read_text())
    assert made == [("omni-ray-token", "auth_token"), ("omni-api", "keys")]
    assert "secretName: omni-ray-token" in service and "secretKeyRef: {name: omni-api, key: keys}" in service
    assert service.count(f"image: {IMAGE}") == 5


def test_the_page_has_haproxys_defaults() -> None:
    rows = re.findall(r"^\| `(RAY_SERVE_HAPROXY_\w+)` \| (\w+) \|", PAGE.read_text(), flags=re.M)
    assert len(rows) == 4
    for name, default in rows:
        assert str(getattr(constants, name)) == default.replace("none", "None")
