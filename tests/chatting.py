"""A toy's API in this process, and `omni-cluster` commands that ask it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from omni_cluster.engine.omni_llm import OmniLLM
from tests.pages import ROOT
from tests.server.local import LocalApp, local_app

TOY = ROOT / "tests" / "families" / "toy" / "toy.yaml"
PATIENCE_S = 60


@contextmanager
def toy_app(folder: Path, token_s: float = 0.0) -> Iterator[LocalApp]:
    """`token_s`: how long a token of each stage takes."""
    config: dict[str, Any] = yaml.safe_load(TOY.read_text())
    for stage in config["stages"]:
        stage["options"] = {"token_s": token_s}
    path = folder / "toy.yaml"
    path.write_text(yaml.safe_dump(config))
    with OmniLLM(path) as omni, local_app(omni) as app:
        yield app


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "omni_cluster", *arguments]


def environment(*programs: Path, **variables: str) -> dict[str, str]:
    """Of a user with these folders of programs alone, as players may be among others."""
    named = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": os.pathsep.join(map(str, programs)), **variables}
    return {name: value for name, value in named.items() if name not in ("COLUMNS", "LINES")}


def run(*arguments: str, typed: str = "", env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A command whose input is no terminal."""
    return subprocess.run(
        command(*arguments),
        input=typed,
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
