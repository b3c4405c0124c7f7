from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3OmniMoeForConditionalGeneration

from omni_cluster.models.checkpoint_maker import CheckpointSummary
from omni_cluster.models.qwen3_omni.checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def qwen3_tiny(tmp_path_factory: pytest.TempPathFactory) -> CheckpointSummary:
    return make_checkpoint("tiny", tmp_path_factory.mktemp("qwen3_omni") / "tiny", device="cpu")


@pytest.fixture(scope="session")
def qwen3_folder(qwen3_tiny: CheckpointSummary) -> Path:
    return qwen3_tiny.path


@pytest.fixture(scope="session")
def qwen3_reference(qwen3_folder: Path) -> Any:
    """transformers' own model of the checkpoint, in float32."""
    return Qwen3OmniMoeForConditionalGeneration.from_pretrained(qwen3_folder, dtype=torch.float32).eval()
