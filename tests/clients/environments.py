"""Environments of single clients: each has the versions that it asks for, and none of ours."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.packages import fetch, program

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements"
CACHE = HERE.parents[1] / ".cache" / "clients"


def python_of(requirements: str) -> Path:
    """The interpreter of an environment with what `requirements/NAME.txt` pins, made at its first use.

    Raises NoPackages.
    """
    pinned = REQUIREMENTS / f"{requirements}.txt"
    with _made(requirements, pinned) as folder:
        if folder is not None:
            uv = program("uv", Path(f"{sys.prefix}-uv/bin/uv"))
            fetch([uv, "venv", "--quiet", "--python", sys.executable, str(folder)])
            python = folder / "bin" / "python"
            fetch([uv, "pip", "install", "--quiet", "--python", str(python), "--no-deps", "-r", str(pinned)])
    return _folder(requirements, pinned) / "bin" / "python"


def node_of(requirements: str) -> Path:
    """A folder with the modules that `requirements/NAME/package-lock.json` pins, Node itself among them.

    Raises NoPackages.
    """
    pinned = REQUIREMENTS / requirements / "package-lock.json"
    with _made(requirements, pinned) as folder:
        if folder is not None:
            shutil.copytree(pinned.parent, folder)
            fetch([program("npm"), "ci", "--loglevel=error", "--ignore-scripts", "--prefix", str(folder)])
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
