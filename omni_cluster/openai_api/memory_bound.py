"""A bound on the memory that this process may take."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

_DATA = resource.RLIMIT_DATA


def data_bytes() -> int:
    """Private memory that this process may write, which RLIMIT_DATA bounds; not libraries and shared memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * resource.getpagesize()


def bound_memory(more_bytes: int) -> None:
    """Bounds memory to `more_bytes` above what is taken now; beyond that, allocations raise MemoryError."""
    _, hard = resource.getrlimit(_DATA)
    resource.setrlimit(_DATA, (data_bytes() + more_bytes, hard))


def room_bytes() -> int:
    """What is left of the bound."""
    return resource.getrlimit(_DATA)[0] - data_bytes()


@contextlib.contextmanager
def not_counted() -> Iterator[None]:
    """Adds what is taken inside, as by an import, to the bound. Does nothing without a bound."""
    bound, hard = resource.getrlimit(_DATA)
    before_bytes = data_bytes()
    resource.setrlimit(_DATA, (hard, hard))
    try:
        yield
    finally:
        kept = bound if bound == resource.RLIM_INFINITY else bound + max(0, data_bytes() - before_bytes)
        resource.setrlimit(_DATA, (kept, hard))
