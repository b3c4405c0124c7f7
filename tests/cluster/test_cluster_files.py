"""The cluster files by Ray's own schema, and the commands of docs/clusters.md by the parsers of what they call."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import tomllib
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import cli as ray_cli
from ray.serve.scripts import cli as serve_cli

from omni_cluster.cli import _parser
from omni_cluster.config.loader import load_config
from omni_cluster.models.registry import known_families

ROOT = Path(__file__).parents[2]
CLUSTER_FILES = ("ray_cluster.yaml", "deploy/ray_cluster_aws.yaml")
PAGE = ROOT / "docs/clusters.md"
HOME = "~/omni_cluster/"
BUILTINS = frozenset({"export", ".", "cd", "make", "sudo"})


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


def page_commands() -> list[str]:
    """The lines of the page's code blocks, comments left out."""
    blocks = re.findall(r"^```\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if line]


def simple_commands(line: str) -> Iterator[list[str]]:
    """The words of each command of a line; of `ray exec` also those of the command that it runs there."""
    words = shlex.split(line, comments=True)
    while words:
        end = words.index("&&") if "&&" in words else len(words)
        command, words = words[:end], words[end + 1 :]
        yield command
        if command[:2] == ["ray", "exec"]:
            yield from simple_commands(command[-1])


def parse(command: list[str]) -> None:
    """Raises what the command itself would, without running it."""
    name, *arguments = command
    if name in ("ray", "serve"):
        group = ray_cli if name == "ray" else serve_cli
        found = group.get_command(click.Context(group), arguments[0])
        assert found is not None, f"{name} has no command {arguments[0]}"
        found.make_context(arguments[0], list(arguments[1:]))
    elif name == "omni-cluster":
        _parser().parse_args(arguments)
    else:
        assert name in BUILTINS or (ROOT / name).is_relative_to(ROOT / ".venv-uv"), name


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {
        "pyproject.toml",
        "Makefile",
        "deploy",
        project["project"]["readme"],
        *project["project"]["license-files"],
    }
    assert needed | {*wheel["packages"], *wheel["force-include"]} <= here


@pytest.mark.parametrize("name", CLUSTER_FILES)
def test_the_nodes_commands_are_such_as_the_shell_and_ray_know(name: str) -> None:
    commands = list(all_commands(cluster(name)))
    assert any("ray start --head" in command for command in commands)
    for command in commands:
        subprocess.run(["bash", "-n", "-c", command], check=True)
        for simple in simple_commands(command):
            parse(simple)


def test_both_files_start_ray_alike() -> None:
    first, second = map(cluster, CLUSTER_FILES)
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


@pytest.mark.parametrize("line", page_commands())
def test_the_pages_commands_are_known(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for command in simple_commands(line):
        parse(command)


def test_a_wrong_command_is_found() -> None:
    for line in ("ray up --now ray_cluster.yaml", "ray exec f.yaml 'serve run --nonblocking a:b'", "omni-cluster chek"):
        with pytest.raises(Exception, match=r"--now|--nonblocking|chek"):
            [parse(command) for command in simple_commands(line)]
