"""deploy/docker/Dockerfile: rules that a builder does not check. tests/served/alone/test_built_image.py builds it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster.image_files import built_from

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy/docker/Dockerfile"
SECRET = re.compile(r"token|key|password|secret", re.IGNORECASE)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Name and arguments of each, continued lines joined."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        name, _, arguments = line.partition(" ")
        yield name, arguments


def of(text: str, name: str) -> list[str]:
    return [arguments for found, arguments in instructions(text) if found == name]


def faults(text: str) -> list[str]:
    """What speaks against an image of this file, a sentence each."""
    return [*_of_packages(text), *_of_users(text), *_of_bases(text), *_of_commands(text), *_of_secrets(text)]


def _of_packages(text: str) -> Iterator[str]:
    for run in of(text, "RUN"):
        if "apt-get install" in run and not ("apt-get update" in run and "rm -rf /var/lib/apt/lists/*" in run):
            yield "apt's lists are another layer's, or stay in the image."
        if "apt-get install" in run and "--no-install-recommends" not in run:
            yield "apt installs what is only recommended."
        if "sudo" in shlex.split(run):
            yield "sudo is used."


def _of_users(text: str) -> Iterator[str]:
    users = of(text, "USER")
    if not users or users[-1] in ("root", "0"):
        yield "It runs as root."
    names = [name for name, _ in instructions(text)]
    if "USER" in names and any("make" in run for run in of(text[: text.index("\nUSER")], "RUN") if "setup" in run):
        yield "The environment belongs to root."
    for name in ("ADD", "COPY"):
        if any(re.match(r"https?:", word) for line in of(text, name) for word in line.split()):
            yield "Something is fetched unchecked."


def _of_bases(text: str) -> Iterator[str]:
    defaults = dict(argument.split("=", 1) for argument in of(text, "ARG") if "=" in argument)
    for base in of(text, "FROM"):
        image = re.sub(r"\$\{(\w+)\}", lambda match: defaults.get(match[1], ""), base).split()[0]
        if ":" not in image or image.endswith(":latest"):
            yield f"{image or base} says no version."


def _of_commands(text: str) -> Iterator[str]:
    for name in ("CMD", "ENTRYPOINT", "HEALTHCHECK"):
        for arguments in of(text, name):
            if "[" not in arguments:
                yield f"{name} runs in a shell, which gets the signals in its place."


def _of_secrets(text: str) -> Iterator[str]:
    for name in ("ARG", "ENV"):
        for word in (word for line in of(text, name) for word in line.split()):
            if SECRET.search(word.split("=")[0]):
                yield f"{word.split('=')[0]} stays in the image."


def test_the_file_has_no_faults() -> None:
    assert faults(FILE.read_text()) == []


@pytest.mark.parametrize(
    ("line", "instead", "fault"),
    [
        ("USER ray", "USER root", "It runs as root."),
        ("USER ray\n", "", "It runs as root."),
        ("BASE=ubuntu:24.04", "BASE=ubuntu", "ubuntu says no version."),
        (" --no-install-recommends", "", "apt installs what is only recommended."),
        (" \\\n    && rm -rf /var/lib/apt/lists/*", "", "apt's lists are another layer's, or stay in the image."),
        ('CMD ["serve", "run", "deployments:app"]', "CMD serve run deployments:app", "CMD runs in a shell"),
        ("ENV PATH=", "ENV RAY_AUTH_TOKEN=abc PATH=", "RAY_AUTH_TOKEN stays in the image."),
    ],
)
def test_a_fault_is_found(line: str, instead: str, fault: str) -> None:
    text = FILE.read_text()
    assert line in text
    assert any(found.startswith(fault) for found in faults(text.replace(line, instead)))


def test_an_image_has_what_the_package_is_built_from_and_nothing_else() -> None:
    copied = [line.removeprefix("--chown=ray:ray ").split()[:-1] for line in of(FILE.read_text(), "COPY")]
    sources = {source for line in copied for source in line}
    assert sources == built_from() | {"tools"}
    first, *rest = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert first == "*"
    assert {line.removeprefix("!") for line in rest if line.startswith("!")} == sources
    assert [line for line in rest if not line.startswith("!")] == ["**/__pycache__"]


def test_an_image_has_the_nodes_environment() -> None:
    (words,) = map(shlex.split, of(FILE.read_text(), "ENV"))
    image = dict(word.split("=", 1) for word in words)
    exports = re.findall(r'^export (\w+)="?([^"\s]+)"?', (ROOT / "deploy/node.sh").read_text(), flags=re.M)
    node = {name: re.sub(r"\$\{\w+:-(\w+)\}", r"\1", value) for name, value in exports}
    assert image["PATH"] == "/opt/omni_cluster/.venv/bin:$PATH"
    assert image | {"PATH": ""} == node | {"PATH": ""}


def test_kubernetes_runs_it_as_the_user_whose_folders_it_has() -> None:
    text = FILE.read_text()
    service = yaml.safe_load((ROOT / "deploy/kuberay/rayservice.yaml").read_text())["spec"]
    (user,) = {match for run in of(text, "RUN") for match in re.findall(r"--[ug]id (\d+)", run)}
    (folders,) = {match for run in of(text, "RUN") for match in re.findall(r"--group=ray (.*)", run)}
    for group in (service["rayClusterConfig"]["headGroupSpec"], *service["rayClusterConfig"]["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert {pod["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {int(user)}
        environment = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
        assert environment["HF_HOME"] in folders.split()
    (application,) = yaml.safe_load(service["serveConfigV2"])["applications"]
    assert application["args"]["config"]["advanced"]["cache_dir"] in folders.split()
    assert of(text, "WORKDIR") == ["/opt/omni_cluster"]
