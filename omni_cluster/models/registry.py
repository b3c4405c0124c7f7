"""The families that a configuration may name: ours, and those that installed packages register.

A family is never chosen by a dotted path of a configuration. Another package registers one by an entry point.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import cast

from omni_cluster.models.family import Family
from omni_cluster.types.errors import ConfigError

ENTRY_POINTS = "omni_cluster_families"
"""The group in which another package names its families: `name = "module:class"`."""
_OURS = {
    "qwen2_5_omni": ("omni_cluster.models.qwen2_5_omni.family", "Qwen2_5Omni"),
    "qwen3_omni": ("omni_cluster.models.qwen3_omni.family", "Qwen3Omni"),
}


@cache
def _families() -> Mapping[str, tuple[str, str]]:
    """Module and class by name. A package cannot replace a family of ours."""
    registered = {each.name: (each.module, each.attr) for each in entry_points(group=ENTRY_POINTS)}
    return {**_OURS, **{name: where for name, where in registered.items() if name not in _OURS}}


def known_families() -> tuple[str, ...]:
    return tuple(_families())


def family_class(name: str) -> type[Family]:
    """Raises ConfigError for a family that is not registered, or whose package is broken."""
    if name not in _families():
        raise ConfigError(f"family is {name!r}; use one of {', '.join(_families())}.")
    module, attribute = _families()[name]
    try:
        return cast(type[Family], getattr(import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"family is {name!r}, but {module}:{attribute} cannot be had ({error}).") from error


def measured_file(family: str) -> Path:
    """What was measured of the family's stages on cards (`planning/measured.py`); it may not be there."""
    package = family_class(family).__module__.rpartition(".")[0]
    return Path(str(files(package))) / "measured.json"
