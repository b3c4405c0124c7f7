"""An application over nodes of one cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.served.app import FULL_DISK, ROOT, ServedApp, serve_run_over_nodes


def default_config() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "stage_configs" / "qwen2_5_omni_tiny.yaml").read_text())
    return config


def placed(config: dict[str, Any]) -> dict[str, Any]:
    """Each stage on a node of its own, and the ingresses on that of the last stage."""
    for stage in config["stages"]:
        stage["placement"] = {"label_selector": {"role": stage["model_stage"]}}
    return config | {"ingress_placement": config["stages"][-1]["placement"]}


@contextmanager
def over_nodes(config: dict[str, Any], path: Path) -> Iterator[ServedApp]:
    """As `placed`: the last stage's node is the head."""
    roles = [stage["model_stage"] for stage in config["stages"]]
    path.write_text(yaml.safe_dump(placed(config)))
    with serve_run_over_nodes(f"config={path}", roles=roles[::-1], system_config=FULL_DISK) as app:
        yield app
