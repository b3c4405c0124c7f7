"""The checkpoint's voices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from omni_cluster.errors import ConfigError

VOICE_FILE = "spk_dict.pt"


@dataclass(frozen=True, slots=True)
class Voice:
    """`bos_token`: id in the thinker's token table that starts the talker's speech. `conditioning` `[1, 192]` and
    `reference_mel` `[1, T, 80]`, float32, are what code2wav imitates."""

    name: str
    bos_token: int
    conditioning: torch.Tensor
    reference_mel: torch.Tensor


def load_voices(folder: Path) -> dict[str, Voice]:
    """All voices of a checkpoint; ConfigError when it has no voice file."""
    path = folder / VOICE_FILE
    if not path.is_file():
        raise ConfigError(f"model {folder} has no {VOICE_FILE}; use a checkpoint with voices.")
    entries = torch.load(path, weights_only=True)
    return {
        name: Voice(name, int(entry["bos_token"]), entry["cond"].float(), entry["ref_mel"].float())
        for name, entry in entries.items()
    }


def choose_voices(voices: dict[str, Voice], allowed: Sequence[str] | None, default: str | None) -> dict[str, Voice]:
    """The voices that requests may name, the default one first; ConfigError for one that the checkpoint lacks."""
    names = list(allowed) if allowed is not None else list(voices)
    names = [default, *(n for n in names if n != default)] if default is not None else names
    missing = [n for n in names if n not in voices]
    if missing:
        raise ConfigError(f"voice {missing[0]!r} is not in the checkpoint; use voices among {', '.join(voices)}.")
    return {name: voices[name] for name in names}
