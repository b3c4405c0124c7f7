"""A bound on the memory that this process may take."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

_DATA = resource.RLIMIT_DATA


def data_bytes() -> int:
    """Private memory that this process may write: what RLIMIT_DATA bounds. Libraries and shared memory are none."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * resource.getpagesize()


def bound_memory(more_bytes: int) -> None:
    """Nothing above `more_bytes` more than there is now: asking for it is a MemoryError."""
    _, hard = resource.getrlimit(_DATA)
    resource.setrlimit(_DATA, (data_bytes() + more_bytes, hard))


def room_bytes() -> int:
    """What is left of the bound."""
    return resource.getrlimit(_DATA)[0] - data_bytes()


@contextlib.contextmanager
def not_counted() -> Iterator[None]:
    """What is taken inside, as by an import, comes on top of the bound; where there is none, nothing changes."""
    bound, hard = resource.getrlimit(_DATA)
    before_bytes = data_bytes()
    resource.setrlimit(_DATA, (hard, hard))
    try:
        yield
    finally:
        kept = bound if bound == resource.RLIM_INFINITY else bound + max(0, data_bytes() - before_bytes)
        resource.setrlimit(_DATA, (kept, hard))
