"""The families that a configuration may name. A family is never chosen by a dotted path."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import cast

from omni_cluster.errors import ConfigError
from omni_cluster.models.family import Family

_FAMILIES = {"qwen2_5_omni": ("omni_cluster.models.qwen2_5_omni.family", "Qwen2_5Omni")}


def known_families() -> tuple[str, ...]:
    return tuple(_FAMILIES)


def family_class(name: str) -> type[Family]:
    """Raises ConfigError for a family that is not registered."""
    if name not in _FAMILIES:
        raise ConfigError(f"family is {name!r}; use one of {', '.join(_FAMILIES)}.")
    module, attribute = _FAMILIES[name]
    return cast(type[Family], getattr(import_module(module), attribute))


def measured_file(family: str) -> Path:
    """What was measured of the family's stages on cards (`planning/measured.py`); it may not be there."""
    return Path(__file__).parent / family / "measured.json"
