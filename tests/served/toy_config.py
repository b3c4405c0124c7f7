"""The toy family's configuration, as tests serve it: stages without vLLM, which are there in seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from tests.served.app import ROOT, ServedApp, serve_run

TOKEN_S = {"text": 0.005, "codes": 0.008, "sound": 0.01}
"""Of a stage: an answer takes seconds."""
LONG = {"text": 400, "codes": 500}
SHORT = {"text": 8, "codes": 20}


def toy_config() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "tests" / "families" / "toy" / "toy.yaml").read_text())
    for stage in config["stages"]:
        stage["options"] = {"token_s": TOKEN_S[stage["model_stage"]]}
    return config


@contextmanager
def served_toy(config: Mapping[str, Any]) -> Iterator[ServedApp]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "toy.yaml"
        path.write_text(yaml.safe_dump(dict(config)))
        with serve_run(f"config={path}") as app:
            yield app
