"""Ray and the application on this machine, for the demo, the tests and a first look."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve

from omni_cluster.cluster.app import build_app
from omni_cluster.cluster.starting import steps_now
from omni_cluster.cluster.terminal import end_serve
from omni_cluster.errors import OmniError

APP_NAME = "default"
POLL_S = 0.5
STARTING = "UPDATING"


class ClusterFailed(OmniError):
    """The application did not come up; says which deployment, and what Ray Serve said of it."""


class LocalCluster:
    """`with LocalCluster() as cluster:` starts Ray and the application, and ends both, whatever happens between.

    `config`: a stage YAML, None for the embedded default. `port`: of the HTTP server on 127.0.0.1.
    """

    def __init__(self, config: Path | str | None = None, port: int = 8000) -> None:
        self._app = build_app({"config": str(config)} if config is not None else None)
        self._port = port
        self.dashboard_url: str | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> LocalCluster:
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
        context = ray.init(
            "local", namespace="serve", include_dashboard=True, log_to_driver=False, logging_level="ERROR"
        )
        self.dashboard_url = f"http://{context.dashboard_url}" if context.dashboard_url else None
        serve.start(http_options={"host": "127.0.0.1", "port": self._port})

    def start(self) -> None:
        """Deploys the application; its stages come up behind."""
        target = serve.RunTarget(target=self._app, name=APP_NAME, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)

    def stage_states(self) -> dict[str, str]:
        """The state of each deployment by its name: what it does as long as it starts, then such as HEALTHY."""
        application = serve.status().applications.get(APP_NAME)
        if application is None:
            return {}
        states = {name: str(status.status.value) for name, status in application.deployments.items()}
        return states | {name: step for name, step in steps_now().items() if states.get(name) == STARTING}

    def wait_ready(self, timeout_s: float = 600.0, on_change: Callable[[dict[str, str]], object] | None = None) -> None:
        """Returns when all deployments are healthy; `on_change` gets their states after every look.

        Raises ClusterFailed when one cannot start, or when the time is over.
        """
        ends_s = time.monotonic() + timeout_s
        while True:
            application = serve.status().applications.get(APP_NAME)
            status = application.status.value if application is not None else "NOT_STARTED"
            states = self.stage_states()  # after it: the last look that is told has all of them healthy
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
            return f"stage {name} did not start: {status.message.strip() or 'see its log'}"
    waiting = ", ".join(name for name, state in states.items() if state != "HEALTHY") or "the application"
    return f"{waiting} did not come up within {timeout_s:g} s; see the Ray dashboard for its log."
