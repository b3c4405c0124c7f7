"""The checkpoint's voices."""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_cluster.models import voice_names as names
from omni_cluster.types.errors import ConfigError

if TYPE_CHECKING:
    import torch

VOICE_FILE = "spk_dict.pt"

HIGH_VOICE, LOW_VOICE = "Chelsie", "Ethan"


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
    import torch

    entries = torch.load(_voice_file(folder), weights_only=True)
    return {
        name: Voice(name, int(entry["bos_token"]), entry["cond"].float(), entry["ref_mel"].float())
        for name, entry in entries.items()
    }


def voice_names(folder: Path) -> tuple[str, ...]:
    """Of all voices of a checkpoint, without torch where the file is in the form that torch writes today."""
    path = _voice_file(folder)
    if not zipfile.is_zipfile(path):
        return tuple(load_voices(folder))
    with zipfile.ZipFile(path) as archive:
        (entries,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        with archive.open(entries) as file:
            return tuple(map(str, _NamesReader(file).load()))


def _voice_file(folder: Path) -> Path:
    path = folder / VOICE_FILE
    if not path.is_file():
        raise ConfigError(f"model {folder} has no {VOICE_FILE}; use a checkpoint with voices.")
    return path


class _Unread:
    """Stands for whatever is no plain value, and does nothing with what it is made of."""

    def __init__(self, *_: Any) -> None: ...

    def __call__(self, *_: Any) -> _Unread:
        return self

    def __setstate__(self, _: Any) -> None: ...


class _NamesReader(pickle.Unpickler):
    """Reads dictionaries, texts and numbers; imports and calls nothing that the file names."""

    def find_class(self, module: str, name: str) -> type[Any]:
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _Unread

    def persistent_load(self, _: Any) -> _Unread:
        return _Unread()


def aliases_of(voices: Sequence[str]) -> dict[str, str]:
    """See `voice_names.aliases_of`."""
    return names.aliases_of(voices, HIGH_VOICE, LOW_VOICE)
