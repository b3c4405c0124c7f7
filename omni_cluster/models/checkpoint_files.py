"""Where a checkpoint's files are, and single rows of its tensors without loading the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_cluster.config.schema import PRESET_PREFIX
from omni_cluster.memory.sizes import INDEX_NAME, SINGLE_NAME
from omni_cluster.types.errors import ConfigError

if TYPE_CHECKING:  # a process that only asks for files starts without torch
    import torch


def checkpoint_folder(model: str, family_preset: Any) -> Path:
    """The local folder of `model`: "preset:NAME" (made on first use), a folder, or a hub name (downloaded once).

    `family_preset(name)` makes or finds the family's embedded checkpoint. Raises ConfigError.
    """
    if model.startswith(PRESET_PREFIX):
        return Path(family_preset(model.removeprefix(PRESET_PREFIX)))
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return folder.resolve()
    if folder.exists() or model.startswith((".", "/", "~")):
        raise ConfigError(
            f"model is {model!r}, a folder without config.json; name a checkpoint's folder or a hub name."
        )
    return _from_hub(model)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"model is {name!r}, which is no folder here and could not be had from the hub; "
            f"name a checkpoint's folder, or a hub name such as Qwen/Qwen2.5-Omni-7B."
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def max_image_pixels(folder: Path, unless_said: int) -> int:
    """What the checkpoint's processor scales larger images down to."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        path = folder / name
        if path.is_file():
            given = json.loads(path.read_text())
            image = given.get("image_processor", given)
            pixels = image.get("max_pixels") or (image.get("size") or {}).get("longest_edge")
            if pixels:
                return math.floor(pixels)
    return unless_said


def tensor_file(folder: Path, name: str) -> Path:
    """The safetensors file that holds tensor `name`."""
    index = folder / INDEX_NAME
    if not index.is_file():
        return folder / SINGLE_NAME
    return folder / str(json.loads(index.read_text())["weight_map"][name])


def tensor_names(folder: Path, prefix: str) -> dict[Path, list[str]]:
    """Names of all tensors under `prefix`, by file."""
    from safetensors import safe_open

    index = folder / INDEX_NAME
    if index.is_file():
        places = json.loads(index.read_text())["weight_map"]
    else:
        with safe_open(folder / SINGLE_NAME, "pt") as file:
            places = dict.fromkeys(file.keys(), SINGLE_NAME)
    by_file: dict[Path, list[str]] = {}
    for name, place in places.items():
        if name.startswith(prefix):
            by_file.setdefault(folder / place, []).append(name)
    return by_file


def load_tensors(folder: Path, prefix: str, device: torch.device) -> dict[str, torch.Tensor]:
    """All tensors under `prefix`, by their names without it."""
    from safetensors import safe_open

    tensors: dict[str, torch.Tensor] = {}
    for path, names in tensor_names(folder, prefix).items():
        with safe_open(path, "pt", device=str(device)) as file:
            tensors |= {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    return tensors


def tensor_rows(folder: Path, name: str, rows: Sequence[int]) -> torch.Tensor:
    """Rows `[len(rows), ...]` of tensor `name`, the rest of it unread."""
    import torch
    from safetensors import safe_open

    with safe_open(tensor_file(folder, name), "pt") as file:
        table = file.get_slice(name)
        return torch.cat([table[row : row + 1] for row in rows])
