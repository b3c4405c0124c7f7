"""Python modules that an installation left uncompiled, as `uv` does: each process of each start compiles them again.

Where `PYTHONDONTWRITEBYTECODE` is set, as in many images, no process keeps what it compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import cache_from_source
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CompiledModules:
    """Modules that were compiled now, and those that could not be: no Python 3, or a folder that cannot be written."""

    done: int
    left: int


def installed_folders() -> list[Path]:
    """Where this Python finds installed packages, and the package itself, which may run from a checkout."""
    folders = {Path(str(each.locate_file(""))).resolve() for each in distributions()}
    folders.add(Path(__file__).resolve().parents[1])
    return sorted(each for each in folders if folders.isdisjoint(each.parents))


def compile_modules(folders: Sequence[Path]) -> CompiledModules:
    """Compiles what is not compiled under these folders, on all cores, to where Python looks for it."""
    sources = [source for folder in folders for source in folder.rglob("*.py") if not _is_compiled(source)]
    if sources:
        command = [sys.executable, "-m", "compileall", "-qq", "-j", "0", *map(str, folders)]
        subprocess.run(command, check=False, stdin=subprocess.DEVNULL)  # it fails if it could not compile one of them
    done = sum(map(_is_compiled, sources))
    return CompiledModules(done, len(sources) - done)


def _is_compiled(source: Path) -> bool:
    return os.path.exists(cache_from_source(str(source)))  # `Path.exists` raises where it may not look
