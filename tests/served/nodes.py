"""The default application over nodes of one cluster."""

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


@contextmanager
def over_nodes(config: dict[str, Any], path: Path) -> Iterator[ServedApp]:
    """Each stage on a node of its own, and the ingresses on that of the last stage, the head."""
    roles = [stage["model_stage"] for stage in config["stages"]]
    for stage, role in zip(config["stages"], roles, strict=True):
        stage["placement"] = {"label_selector": {"role": role}}
    path.write_text(yaml.safe_dump(config | {"ingress_placement": {"label_selector": {"role": roles[-1]}}}))
    with serve_run_over_nodes(f"config={path}", roles=roles[::-1], system_config=FULL_DISK) as app:
        yield app
