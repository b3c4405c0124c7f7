"""Packages from a registry, for environments that tests make."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

FETCH_S = 900
"""The largest environment has some gigabytes."""
_UNREACHED = re.compile(
    r"Failed to fetch|network was disabled|error code (ECONN|ETIMEDOUT|ENOTFOUND|EAI_AGAIN|ENOTCACHED|EBADPLATFORM)"
)
"""What uv and npm say where there is no registry, npm also where Node itself is not for this platform."""


class NoPackages(Exception):
    """The packages cannot be had: there is no registry, or no program to ask it with."""


def program(name: str, *beside: Path) -> str:
    """Raises NoPackages."""
    found = next((str(path) for path in beside if path.exists()), shutil.which(name))
    if found is None:
        raise NoPackages(f"{name} is not installed, so the packages cannot be had.")
    return found


def fetch(command: Sequence[str], folder: Path | None = None, **environment: str) -> str:
    """What the command printed. Raises NoPackages without a registry, and RuntimeError where it fails otherwise."""
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(
        command, cwd=folder, env=kept | environment, capture_output=True, text=True, timeout=FETCH_S, check=False
    )
    if done.returncode == 0:
        return done.stdout
    if _UNREACHED.search(done.stderr):
        raise NoPackages(f"{Path(command[0]).name} cannot get the packages from a registry.")
    raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
