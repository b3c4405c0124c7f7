"""A process that starts Ray, and the signal that asks it to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any

from ray._private import worker
from ray.serve import Application

from omni_cluster.cluster.app import build_app


def served_app(args: Mapping[str, Any]) -> Application:
    """See `build_app`; for the process of `serve run`."""
    end_on_sigterm()
    return build_app(args)


def end_on_sigterm() -> None:
    """Once Ray is up, SIGTERM ends this process as Ctrl-C does: the application first, then Ray.

    Ray's own handler, which it sets while it starts, prints its native stack and ends the process in the midst of it.
    """
    if _handle not in worker._post_init_hooks:
        worker._post_init_hooks.append(_handle)


def _handle() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends already
    raise KeyboardInterrupt
