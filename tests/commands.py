"""Shell commands of pages and cluster files, read by the parsers of what they call."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
from collections.abc import Iterator

import click
from ray.scripts.scripts import cli as ray_cli
from ray.serve.scripts import cli as serve_cli

from omni_cluster.cli import _parser
from tests.pages import ROOT

IMAGE = "registry.example/omni-cluster:gpu"
BUILTINS = frozenset({"export", ".", "cd", "sudo"})
COREUTILS = frozenset({"cat", "cp", "curl", "echo", "grep", "mkdir", "openssl", "tail"})
NOT_HERE = {
    "buildah": {"bud"},
    "docker": {"build", "commit", "push", "run"},
    "ffmpeg": {"-i"},
    "grafana-server": {"--homepath"},
    "helm": {"install", "repo"},
    "kubectl": {"apply", "create", "delete", "port-forward", "wait"},
    "nvidia-cuda-mps-control": {"-d"},
    "pip": {"install"},
    "podman": {"run"},
    "uv": {"pip"},
    "vllm": {"bench"},
}
"""Commands whose parsers are not in this environment, and what a page may say first to them."""
_OF_SHELL = frozenset("();|&<>")


def lines_of(script: str) -> Iterator[str]:
    """Its lines; those that go on, behind a backslash or within quotes, are one."""
    begun = ""
    for line in script.replace("\\\n", " ").splitlines():
        begun = f"{begun}\n{line}" if begun else line
        try:
            shlex.split(begun, comments=True)
        except ValueError:
            continue
        if begun.strip():
            yield begun
        begun = ""
    if begun:
        raise ValueError(f"a quote is not closed: {begun}")


def simple_commands(line: str) -> Iterator[list[str]]:
    """The words of each command of a line; of `ray exec` also those of the command that it runs there."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    command: list[str] = []
    for word in [*lexer, ";"]:
        if not set(word) <= _OF_SHELL:
            command.append(word)
            continue
        if command:
            yield command
            if command[:2] == ["ray", "exec"]:
                yield from simple_commands(command[-1])
        command = [">"] if word == ">" else []


def parse(command: list[str]) -> None:
    """Raises what the command itself would, without running it."""
    while re.match(r"\w+=", command[0]):
        command = command[1:]
    name, *arguments = command
    name = name.removeprefix(".venv/bin/")
    if name in ("ray", "serve"):
        group = ray_cli if name == "ray" else serve_cli
        found = group.get_command(click.Context(group), arguments[0])
        assert found is not None, f"{name} has no command {arguments[0]}"
        found.make_context(arguments[0], list(arguments[1:]))
    elif name == "omni-cluster":
        _parser().parse_args(arguments)
    elif name == "make":
        target = arguments[2] if arguments[0] == "-C" else arguments[0]
        assert f"\n{target}:" in (ROOT / "Makefile").read_text(), f"no target {target}"
    elif name == "python":
        assert is_program(arguments), arguments
    elif name in NOT_HERE:
        assert arguments[0] in NOT_HERE[name], f"{name} has no command {arguments[0]}"
        if arguments[0] == "run" and IMAGE in arguments:
            parse(arguments[arguments.index(IMAGE) + 1 :])
    elif name.startswith("examples/"):
        assert os.access(ROOT / name, os.X_OK), name
    elif name in COREUTILS:
        assert shutil.which(name), name
    else:
        assert name in {*BUILTINS, ">"} or (ROOT / name).is_relative_to(ROOT / ".venv-uv"), name


def is_program(arguments: list[str]) -> bool:
    """Whether Python finds the module, or the file of the checkout."""
    if arguments[0] == "-m":
        return importlib.util.find_spec(arguments[1]) is not None
    return (ROOT / arguments[0]).is_file()


def files_named(command: list[str]) -> set[str]:
    """Files of the checkout that it names."""
    words = {word.removeprefix("config=") for word in command}
    return {word for word in words if re.match(r"[\w./-]+(\.yaml|\.json|\.sh|Dockerfile)$", word) and word[0] != "/"}
