"""Where a host keeps what can be made again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from omni_cluster.config.problems import Problem, refuse


def cache_folder() -> Path:
    """Of this user on this host; it may not be there yet."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "omni_cluster"


def compiled_folder(cache_dir: str | None) -> Path:
    """Of what engines compile, on this host, for a configuration's `cache_dir`."""
    return cache_folder() / "compiled" if cache_dir is None else Path(cache_dir).expanduser()


def _starts_at_a_root(folder: str) -> str:
    if not folder.startswith(("/", "~/")):
        refuse([Problem("", folder, "each host must find it, so write it from / or ~/, for example ~/omni_cache")])
    return folder


HostFolder = Annotated[str, AfterValidator(_starts_at_a_root)]
"""A folder that is the same on each host, wherever a process of it was started."""
