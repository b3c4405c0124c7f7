"""The checkpoint's voices: each is an id of the talker's vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_cluster.types.errors import ConfigError, RequestError

DEFAULT_VOICE = "ethan"
"""transformers' own."""


def voice_ids(config: Mapping[str, Any]) -> dict[str, int]:
    """Of config.json, by name in lower case, the default one first; ConfigError where there are none."""
    ids = {name.lower(): int(number) for name, number in (config["talker_config"].get("speaker_id") or {}).items()}
    if not ids:
        raise ConfigError("the checkpoint's talker_config has no speaker_id; use a checkpoint with voices.")
    return dict(sorted(ids.items(), key=lambda voice: voice[0] != DEFAULT_VOICE))


def voice_id(voices: Mapping[str, int], name: str) -> int:
    """Of a voice by its name in any case; RequestError for one that is not there."""
    if name.lower() not in voices:
        raise RequestError(f"voice is {name!r}; use one of {', '.join(voices)}.")
    return voices[name.lower()]
