"""The configuration of the tests' engines, whichever one is the default: weights are random, and expectations exact."""

from __future__ import annotations

from typing import Final

from omni_cluster.config.loader import STAGE_CONFIGS

TINY_CONFIG: Final = STAGE_CONFIGS / "qwen2_5_omni_tiny.yaml"
