"""Files that are whole or not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def made_by(command: str, path: Path) -> Path:
    """A file that a command has made. Ends this one with a sentence where it has not."""
    if not path.is_file():
        raise SystemExit(f"{path} is not there: run python -m training.{command} first.")
    return path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file to write, which then takes the place of `path`: a writer that is killed leaves what was there before."""
    partial = path.with_name(f"{path.name}.partial")
    yield partial
    partial.replace(path)
