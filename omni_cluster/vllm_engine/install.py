"""What is put in place of vLLM's own where vLLM has no setting for it: by a call where an engine is built, never by an
import, and in each process that needs it.
"""

from __future__ import annotations

import atexit
import gc
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
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


@contextmanager
def log_buffers_kept() -> Iterator[None]:
    """Buffers of this process's loggers keep their targets while vLLM configures its own loggers.

    It does so by `dictConfig`, which closes all handlers: Ray Serve's would write nothing more to its replica's log.
    """
    loggers = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    handlers = [handler for logger in (logging.root, *loggers) for handler in logger.handlers]
    targets = {handler: handler.target for handler in handlers if isinstance(handler, MemoryHandler)}
    try:
        yield
    finally:
        for buffer, target in targets.items():
            buffer.setTarget(target)


def add_utility_calls(engine_core: type, *calls: Callable[..., Any]) -> None:
    """Lets vLLM's engine core answer these beside its own: it answers utility calls by the name of its method."""
    for call in calls:
        setattr(engine_core, call.__name__, call)


def take_back_signals() -> None:
    """Python's handlers get this process's signals: as a process connects to Ray, native ones are put over them.

    vLLM's engine core ends in order on SIGTERM only where it hears of it.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # such a process has no handlers of vLLM's
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.getsignal(number))


def search_no_garbage_at_exit() -> None:
    """This process ends without a last search of all its objects for cycles, which takes seconds.

    vLLM does the same on ROCm. Who waits for an engine's end kills one that takes five seconds.
    """
    atexit.register(gc.freeze)
