"""Environments of single clients: each has the versions that it asks for, and none of ours."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements"
CACHE = HERE.parents[1] / ".cache" / "clients"
INSTALL_S = 900
"""The largest of them has some gigabytes."""
_UNREACHED = re.compile(
    r"Failed to fetch|network was disabled|error code (ECONN|ETIMEDOUT|ENOTFOUND|EAI_AGAIN|ENOTCACHED|EBADPLATFORM)"
)
"""What uv and npm say where there is no registry, npm also where Node itself is not for this platform."""


class NoPackages(Exception):
    """The packages of a client cannot be had: there is no registry, or no program to ask it with."""


def python_of(requirements: str) -> Path:
    """The interpreter of an environment with what `requirements/NAME.txt` pins, made at its first use.

    Raises NoPackages.
    """
    pinned = REQUIREMENTS / f"{requirements}.txt"
    with _made(requirements, pinned) as folder:
        if folder is not None:
            uv = _program("uv", Path(f"{sys.prefix}-uv/bin/uv"))
            _install([uv, "venv", "--quiet", "--python", sys.executable, str(folder)])
            python = folder / "bin" / "python"
            _install([uv, "pip", "install", "--quiet", "--python", str(python), "--no-deps", "-r", str(pinned)])
    return _folder(requirements, pinned) / "bin" / "python"


def node_of(requirements: str) -> Path:
    """A folder with the modules that `requirements/NAME/package-lock.json` pins, Node itself among them.

    Raises NoPackages.
    """
    pinned = REQUIREMENTS / requirements / "package-lock.json"
    with _made(requirements, pinned) as folder:
        if folder is not None:
            shutil.copytree(pinned.parent, folder)
            _install([_program("npm"), "ci", "--loglevel=error", "--ignore-scripts", "--prefix", str(folder)])
    return _folder(requirements, pinned)


@contextmanager
def _made(requirements: str, pinned: Path) -> Iterator[Path | None]:
    """The folder that is to be filled, or None where it is whole already; one process at a time fills it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{requirements}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = _folder(requirements, pinned)
        whole = folder.with_name(f"{folder.name}.whole")
        if whole.exists():
            yield None
            return
        shutil.rmtree(folder, ignore_errors=True)
        yield folder
        whole.touch()


def _folder(requirements: str, pinned: Path) -> Path:
    """Named by what is pinned: other versions are another environment."""
    return CACHE / f"{requirements}-{hashlib.sha256(pinned.read_bytes()).hexdigest()[:8]}"


def _program(name: str, *beside: Path) -> str:
    found = next((str(path) for path in beside if path.exists()), shutil.which(name))
    if found is None:
        raise NoPackages(f"{name} is not installed, so the client's packages cannot be had.")
    return found


def _install(command: Sequence[str]) -> None:
    """Raises NoPackages without a registry, and RuntimeError where it has not what is pinned."""
    unset = {"PYTHONPATH", "VIRTUAL_ENV"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if made.returncode == 0:
        return
    if _UNREACHED.search(made.stderr):
        raise NoPackages(f"{Path(command[0]).name} cannot get the client's packages from a registry.")
    raise RuntimeError(f"{' '.join(command)}: {made.stderr}")
