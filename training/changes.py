"""Variants of a configuration: what each changes of it, by paths."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from omni_cluster.bench.errors import BenchError


@dataclass(frozen=True, slots=True)
class Variant:
    """A name, and the values that are other ones than the base's, by their paths. A stage goes by its name."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    def of(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration. Raises BenchError for a path that leads into a value."""
        made = copy.deepcopy(dict(base))
        for path, value in self.changes.items():
            _set(made, path, value)
        return made


def _set(config: dict[str, Any], path: str, value: Any) -> None:
    stages = {stage["model_stage"]: stage for stage in config["stages"]}
    *folders, last = path.split(".")
    place: Any = config
    for name in folders:
        place = stages[name] if place is config and name in stages else place.setdefault(name, {})
        if not isinstance(place, dict):
            raise BenchError(f"{path} leads into {name}, which is no mapping; end the path there.")
    place[last] = value


def read_variants(file: Path) -> list[Variant]:
    """Raises BenchError for what is not a mapping of names to mappings of paths."""
    try:
        given = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise BenchError(f"{file} cannot be read ({str(error).splitlines()[0]}); name a YAML file.") from None
    if not isinstance(given, dict) or not all(isinstance(changes, dict) for changes in given.values()):
        raise BenchError(f"{file} is no mapping of names to paths; write for example 'ten: {{limits.max_wait_s: 10}}'.")
    return [Variant(str(name), changes) for name, changes in given.items()]


def variant_of(name: str, *changes: str) -> Variant:
    """Of PATH=VALUE, the value as YAML. Raises BenchError."""
    wrong = [change for change in changes if "=" not in change]
    if wrong:
        raise BenchError(f"{name} has {wrong[0]!r}; write PATH=VALUE, for example limits.max_wait_s=10.")
    split = (change.partition("=") for change in changes)
    return Variant(name, {path: yaml.safe_load(value) for path, _, value in split})
