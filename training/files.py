"""Files that are whole or not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file to write, which then takes the place of `path`: a writer that is killed leaves what was there before."""
    partial = path.with_name(f"{path.name}.partial")
    yield partial
    partial.replace(path)
