"""Configurations whose API has two keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omni_cluster.config.access import ApiConfig
from omni_cluster.config.limits import Limits
from omni_cluster.config.loader import load_config
from omni_cluster.config.schema import PipelineConfig
from omni_cluster.models.registry import known_families
from tests.configs import TINY_CONFIG

ONE, OTHER = "the-first-key-0001", "the-other-key-0002"


def config_of(folder: Path, limits: Limits | None = None, **api: Any) -> PipelineConfig:
    keys = folder / "keys.txt"
    keys.write_text(f"{ONE}\n{OTHER}\n")
    config = load_config(TINY_CONFIG, known_families=known_families())
    named = ApiConfig(keys_file=str(keys), **api) if api else ApiConfig()
    return config.model_copy(update={"api": named, "limits": limits or config.limits})
