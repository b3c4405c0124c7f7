"""Much made by all cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")
CORES: Final = os.cpu_count() or 1
CHUNK: Final = 64


def by_cores(make: Callable[[Given], Made], given: Sequence[Given], cores: int = CORES) -> Iterator[Made]:
    """What is made of each, in order. `cores`: one process each; 0: none beside this one."""
    if cores == 0:
        yield from map(make, given)
        return
    # Forked, for each would import torch otherwise: nothing has been computed yet.
    with multiprocessing.get_context("fork").Pool(cores) as processes:
        yield from processes.imap(make, given, CHUNK)
