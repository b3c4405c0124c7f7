"""A process that starts Ray and the application: `serve run`, the demo, the tests; and an end in order."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from rich.console import Console

from omni_cluster.cluster.app import INGRESS_NAME, bind_app, config_of
from omni_cluster.cluster.serve_private import (
    KNOWN_WARNINGS,
    SERVE_CONTROLLER_NAME,
    SERVE_NAMESPACE,
    controller_of,
    get_global_client,
    once_ray_is_up,
    print_no_more_logs,
    set_global_client,
)
from omni_cluster.cluster.start_table import start_table
from omni_cluster.cluster.starting import READY, steps_now
from omni_cluster.models.dropped_warnings import drop_warnings
from omni_cluster.types.errors import OmniError

APP_NAME = "default"
POLL_S = 0.5
STARTING = "UPDATING"
HEALTHY = "HEALTHY"
WAITS = "waits for its process"
"""What a deployment does until its replica says more: Ray starts a process for it."""
SLOW_START, SLOW_START_S = "SERVE_SLOW_STARTUP_WARNING_S", "600"
"""Serve warns of replicas that take longer to start than this; its own 30 s are less than imports may take."""
STOPPED = "omni-cluster: stopped by Ctrl-C."
INTERRUPTED = 130
"""The exit status of a process that Ctrl-C ended, as shells have it."""
END_TIMEOUT_S = 30.0
ANSWER_S = 10.0
"""What the ingresses may take to answer beside the grace that requests have."""
LAST_BYTES_S = 0.5
"""Serve's proxy, which is killed, may still have the last bytes of an answer."""
LOOK_S = 0.1
LOGS = "/tmp/ray/session_latest/logs/serve"


class ClusterFailed(OmniError):
    """The application did not come up; says which deployment, and what Ray Serve said of it."""


class LocalCluster:
    """`with LocalCluster() as cluster:` starts Ray and the application, and ends both, whatever happens between.

    `config`: a stage YAML, None for the embedded default. `port`: of the HTTP server on 127.0.0.1.
    """

    def __init__(self, config: Path | str | None = None, port: int = 8000) -> None:
        self._app = bind_app(config_of({} if config is None else {"config": str(config)}))
        self._port = port

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> LocalCluster:
        if ray.is_initialized():  # that one would be ended in the place of ours
            raise ClusterFailed(
                "Ray runs in this process already; call ray.shutdown() first, or start another process."
            )
        try:
            self._start_ray()
            self.start()
        except Exception as error:
            self.shutdown()
            raise ClusterFailed(f"Ray did not start: {error}") from error
        except BaseException:
            self.shutdown()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _start_ray(self) -> None:
        # "local": without it Ray joins whatever cluster it finds on this machine, and the end of one ends the other.
        # Its dashboard is a process for each of its pages, which are not worth their start for a cluster of minutes.
        ray.init("local", namespace="serve", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        serve.start(http_options={"host": "127.0.0.1", "port": self._port})

    def start(self) -> None:
        """Deploys the application; its stages come up behind."""
        target = serve.RunTarget(target=self._app, name=APP_NAME, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)

    def stage_states(self) -> dict[str, str]:
        """What each deployment does, by its name: a step of its start, then READY, or what Serve says of it."""
        application = serve.status().applications.get(APP_NAME)
        if application is None:
            return {}
        states = {name: str(status.status.value) for name, status in application.deployments.items()}
        steps = steps_now()
        return {
            name: steps.get(name, WAITS) if state == STARTING else READY if state == HEALTHY else state
            for name, state in states.items()
        }

    def wait_ready(self, timeout_s: float = 600.0, on_change: Callable[[dict[str, str]], object] | None = None) -> None:
        """Returns when all deployments are healthy; `on_change` gets their states after every look.

        Raises ClusterFailed when one cannot start, or when the time is over.
        """
        ends_s = time.monotonic() + timeout_s
        while True:
            application = serve.status().applications.get(APP_NAME)
            status = application.status.value if application is not None else "NOT_STARTED"
            states = self.stage_states()  # read after the status, so that the last report has all of them healthy
            if on_change is not None:
                on_change(states)
            if status == "RUNNING":
                return
            if status == "DEPLOY_FAILED" or time.monotonic() > ends_s:
                raise ClusterFailed(failure(application, states, timeout_s))
            time.sleep(POLL_S)

    def shutdown(self) -> None:
        """Ends the application and Ray; safe to call twice."""
        if ray.is_initialized():
            end_serve()
            ray.shutdown()


def failure(application: Any, states: dict[str, str], timeout_s: float) -> str:
    """One sentence about the first deployment that did not come up."""
    for name, status in (application.deployments if application is not None else {}).items():
        if status.status.value in ("UNHEALTHY", "DEPLOY_FAILED"):
            return f"stage {name} did not start: {status.message.strip() or f'see its log under {LOGS}'}"
    waiting = ", ".join(name for name, state in states.items() if state != READY) or "the application"
    return f"{waiting} did not come up within {timeout_s:g} s; see its log under {LOGS}."


def served_app(args: Mapping[str, Any]) -> Application:
    """The application for the process of `serve run`, which shows its start and ends it in order."""
    config = config_of(args)
    if not ray.is_initialized():  # else Serve's own process builds it
        os.environ.setdefault(SLOW_START, SLOW_START_S)
        drop_warnings(KNOWN_WARNINGS)
        end_on_signals(config.limits.closing_grace_s, leaves=True)
        _show_start([stage.model_stage for stage in config.stages])
    return bind_app(config)


def _show_start(stages: Sequence[str]) -> None:
    """On a terminal. Elsewhere the replicas' logs, which Ray prints, say the same."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        shows = threading.Thread(target=_show_until_ready, args=(stages, console), daemon=True)
        once_ray_is_up(shows.start)


def _show_until_ready(stages: Sequence[str], console: Console) -> None:
    """In a thread: `serve run` waits for the same. Ends with Ray, whether or not the stages came up."""
    waiting = dict.fromkeys(stages, WAITS)
    with start_table(console) as table, contextlib.suppress(RayError, RuntimeError):
        while ray.is_initialized() and not table.is_ready:
            table.update(waiting | {name: step for name, step in steps_now().items() if name in waiting})
            time.sleep(POLL_S)


def end_on_signals(grace_s: float = 0.0, *, leaves: bool = False) -> None:
    """Ctrl-C, and once Ray is up SIGTERM, end this process in order: the application first, then Ray.

    Ray's own handler of SIGTERM, which it sets while it starts, prints its native stack and ends the process in the
    midst of it. `grace_s`: what running requests are given on SIGTERM. `leaves`: Ctrl-C leaves by SystemExit, past
    what would print more of it, else by KeyboardInterrupt.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, functools.partial(_interrupt, leaves))
    once_ray_is_up(functools.partial(_handle_sigterm, grace_s))


def _handle_sigterm(grace_s: float) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, functools.partial(_terminate, grace_s))


def _terminate(grace_s: float, _number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends already
    if grace_s > 0:
        let_requests_end(grace_s)
    end_serve()
    raise KeyboardInterrupt("SIGTERM")


def _interrupt(leaves: bool, _number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends already
    print_no_more_logs()
    print(f"\n{STOPPED}", file=sys.stderr, flush=True)  # at once: the end takes some seconds
    if not leaves:
        raise KeyboardInterrupt(STOPPED)
    if ray.is_initialized():
        end_serve()
    raise SystemExit(INTERRUPTED)


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
