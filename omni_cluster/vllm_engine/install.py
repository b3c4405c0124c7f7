"""What is put in place of vLLM's own where vLLM has no setting for it: by a call where an engine is built, never by an
import, and in each process that needs it.
"""

from __future__ import annotations

import atexit
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_REPLACING = threading.RLock()


@contextmanager
def replaced(owner: Any, name: str, ours: Any) -> Iterator[None]:
    """`owner.name` is `ours` while vLLM constructs what looks it up, and vLLM's own afterwards.

    One at a time in a process: of two that overlap, the one that ends last would put the other's back.
    """
    with _REPLACING:
        stock = getattr(owner, name)
        setattr(owner, name, ours)
        try:
            yield
        finally:
            setattr(owner, name, stock)


def add_utility_calls(engine_core: type, *calls: Callable[..., Any]) -> None:
    """Lets vLLM's engine core answer these beside its own: it answers utility calls by the name of its method."""
    for call in calls:
        setattr(engine_core, call.__name__, call)


def search_no_garbage_at_exit() -> None:
    """This process ends without a last search of all its objects for cycles, which takes seconds.

    vLLM does the same on ROCm. Who waits for an engine's end kills one that takes five seconds.
    """
    atexit.register(gc.freeze)
