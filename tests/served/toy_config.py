"""The toy family's configuration, as tests serve it: stages without vLLM, which are there in seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from tests.served.app import ROOT, ServedApp, serve_run

TOY = ROOT / "tests" / "families" / "toy" / "toy.yaml"
TOKEN_S = {"text": 0.005, "codes": 0.006, "sound": 0.01}
"""Of a stage: an answer takes seconds."""
LONG = {"text": 400, "codes": 350}
SHORT = {"text": 8, "codes": 20}


def toy_config() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(TOY.read_text())
    for stage in config["stages"]:
        stage["options"] = {"token_s": TOKEN_S[stage["model_stage"]]}
    return config


def bounded(keys: Path) -> dict[str, Any]:
    """Two ingresses: few requests may wait, bodies have to come quickly, and little may be left unread."""
    places = {"max_ongoing_requests": 12, "max_queued_requests": 24}
    return {
        "ingress_replicas": 2,
        "limits": {"max_prompt_tokens": 32_000, "upload_timeout_s": 3, "max_unread_bytes": 262_144, **places},
        "api": {"keys_file": str(keys), "cors_origins": ["https://app.example"]},
        "fetch": {"allow_private": True},
    }


@contextmanager
def served_toy(config: Mapping[str, Any]) -> Iterator[ServedApp]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "toy.yaml"
        path.write_text(yaml.safe_dump(dict(config)))
        with serve_run(f"config={path}") as app:
            yield app
