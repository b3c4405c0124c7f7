"""A process that starts Ray: the application of `serve run`, and an end in order."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.serve import Application

from omni_cluster.cluster.app import build_app
from omni_cluster.cluster.serve_private import (
    SERVE_CONTROLLER_NAME,
    SERVE_NAMESPACE,
    controller_of,
    get_global_client,
    once_ray_is_up,
    set_global_client,
)

END_TIMEOUT_S = 30.0
LOOK_S = 0.1


def served_app(args: Mapping[str, Any]) -> Application:
    """See `build_app`; for the process of `serve run`."""
    end_on_sigterm()
    return build_app(args)


def end_on_sigterm() -> None:
    """Once Ray is up, SIGTERM ends this process as Ctrl-C does: the application first, then Ray.

    Ray's own handler, which it sets while it starts, prints its native stack and ends the process in the midst of it.
    """
    once_ray_is_up(_handle_sigterm)


def _handle_sigterm() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends already
    end_serve()
    raise KeyboardInterrupt


def end_serve() -> None:
    """Ends all applications and Ray Serve itself; what has not ended in time ends with Ray.

    Serve's own `shutdown` waits in a call to its controller, which ends by the controller's death: Ray, which would try
    it again, may tell the terminal that it failed.
    """
    client = get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return
    client.shutdown_cached_handles()
    try:
        ray.get(controller_of(client).graceful_shutdown.remote(wait=False), timeout=END_TIMEOUT_S)
    except (RayActorError, TimeoutError):
        return  # it died already, or will not end by itself
    ends_s = time.monotonic() + END_TIMEOUT_S
    while _has_controller() and time.monotonic() < ends_s:
        time.sleep(LOOK_S)
    set_global_client(None)


def _has_controller() -> bool:
    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True
