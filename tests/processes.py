"""Processes of the machine, any of which may end while a test looks at it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import psutil

LEAST_ENGINE_BYTES = 100 << 20
"""A watchdog has less."""


def family(pid: int) -> list[psutil.Process]:
    """The replica, and the processes that it started."""
    replica = psutil.Process(pid)
    return [replica, *replica.children(recursive=True)]


def engine_of(pid: int) -> int:
    """The process that computes: the replica's child with the most memory, or itself when its engine is inside it."""
    replica, *children = family(pid)
    large = [child for child in children if resident_bytes(child) >= LEAST_ENGINE_BYTES]
    return max(large, key=resident_bytes, default=replica).pid


def resident_bytes(process: psutil.Process) -> int:
    """What it has in memory; nothing once it has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def command_line(process: psutil.Process) -> str:
    """Its words, or the name that it gave itself; nothing once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def shared_memory_of(processes: Sequence[psutil.Process]) -> set[Path]:
    """The files of what they have mapped of the machine's shared memory; what is unlinked ends with them."""
    found: set[Path] = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {path for each in process.memory_maps() if (path := Path(each.path)).is_relative_to("/dev/shm")}
    return {path for path in found if path.exists()}


def kill(process: psutil.Process) -> None:
    """Unless it has ended: a replica's processes end with it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def running_after(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that still run then. One that ended and whose parent has not asked how holds nothing any more."""
    _, left = psutil.wait_procs(processes, timeout=timeout_s)
    return [process for process in left if not _has_ended(process)]


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
