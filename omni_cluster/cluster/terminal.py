"""A process that starts Ray: the application of `serve run`, and an end in order."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve import Application
from ray.serve.exceptions import RayServeException

from omni_cluster.cluster.app import INGRESS_NAME, bind_app, config_of
from omni_cluster.cluster.serve_private import (
    SERVE_CONTROLLER_NAME,
    SERVE_NAMESPACE,
    controller_of,
    get_global_client,
    once_ray_is_up,
    set_global_client,
)

END_TIMEOUT_S = 30.0
ANSWER_S = 10.0
"""What the ingresses may take to answer beside the grace that requests have."""
LAST_BYTES_S = 0.5
"""Serve's proxy, which is killed, may still have the last bytes of an answer."""
LOOK_S = 0.1


def served_app(args: Mapping[str, Any]) -> Application:
    """See `build_app`; for the process of `serve run`."""
    config = config_of(args)
    end_on_sigterm(config.limits.closing_grace_s)
    return bind_app(config)


def end_on_sigterm(grace_s: float = 0.0) -> None:
    """Once Ray is up, SIGTERM ends this process as Ctrl-C does: the application first, then Ray.

    Ray's own handler, which it sets while it starts, prints its native stack and ends the process in the midst of it.
    `grace_s`: what running requests are given before that.
    """
    once_ray_is_up(functools.partial(_handle_sigterm, grace_s))


def _handle_sigterm(grace_s: float) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, functools.partial(_interrupt, grace_s))


def _interrupt(grace_s: float, _number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends already
    if grace_s > 0:
        let_requests_end(grace_s)
    end_serve()
    raise KeyboardInterrupt


def let_requests_end(grace_s: float) -> None:
    """Has all ingresses turn new requests away, and waits for those that run: Serve ends its proxies first of all.

    In a thread: whatever is broken or hangs, the end goes on.
    """
    asks = threading.Thread(target=_ask_ingresses, args=(grace_s + ANSWER_S,), daemon=True)
    asks.start()
    asks.join(grace_s + ANSWER_S)
    time.sleep(LAST_BYTES_S)


def _ask_ingresses(wait_s: float) -> None:
    with contextlib.suppress(RayError, RayServeException, TimeoutError):
        for name, application in serve.status().applications.items():
            if INGRESS_NAME in application.deployments:
                handle = serve.get_deployment_handle(INGRESS_NAME, name)
                handle.broadcast("let_all_end").results(timeout_s=wait_s)


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
