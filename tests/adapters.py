"""LoRA adapters of random weights in PEFT's format, and checkpoints that have one of them in their weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from omni_cluster.memory.sizes import SINGLE_NAME
from omni_cluster.models.lora import CONFIG_NAME, WEIGHTS_NAME

LAYERS = "thinker.model.layers."
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCALE = 0.15
"""Of random weights: enough for another answer of the tiny checkpoint."""


def write_adapter(
    folder: Path,
    checkpoint: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    projections: Sequence[str] = ALL,
    whole_model: bool = True,
    **config: Any,
) -> Path:
    """`whole_model`: names as of one that was trained on the whole model, else on the thinker alone."""
    folder.mkdir(parents=True)
    random, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in _linear(checkpoint, projections).items():
        inner = name if whole_model else name.removeprefix("thinker.")
        rows, columns = weight.shape
        tensors[f"base_model.model.{inner}.lora_A.weight"] = SCALE * torch.randn(rank, columns, generator=random)
        tensors[f"base_model.model.{inner}.lora_B.weight"] = SCALE * torch.randn(rows, rank, generator=random)
    save_file(tensors, folder / WEIGHTS_NAME)
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(projections), "bias": "none"}
    (folder / CONFIG_NAME).write_text(json.dumps({**told, **config}))
    return folder


def merged(adapter: Path, checkpoint: Path, out: Path) -> Path:
    """A checkpoint whose weights are the sum of both: what PEFT's `merge_and_unload` computes."""
    shutil.copytree(checkpoint, out)
    weights, changes = load_file(checkpoint / SINGLE_NAME), load_file(adapter / WEIGHTS_NAME)
    config = json.loads((adapter / CONFIG_NAME).read_text())
    scaling = config["lora_alpha"] / config["r"]
    for name, a in changes.items():
        if not name.endswith(".lora_A.weight"):
            continue
        inner = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        target = f"{inner if inner.startswith('thinker.') else f'thinker.{inner}'}.weight"
        product = changes[name.replace("lora_A", "lora_B")].double() @ a.double()
        weights[target] = (weights[target].double() + scaling * product).to(weights[target].dtype)
    save_file(weights, out / SINGLE_NAME, metadata={"format": "pt"})
    return out


def _linear(checkpoint: Path, projections: Sequence[str]) -> dict[str, torch.Tensor]:
    weights = load_file(checkpoint / SINGLE_NAME)
    return {
        name.removesuffix(".weight"): weight
        for name, weight in weights.items()
        if name.startswith(LAYERS) and name.endswith(tuple(f"{each}.weight" for each in projections))
    }
