"""All of Ray and Ray Serve that they do not promise to keep: the other modules have it from here."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray import __version__

from omni_cluster.types.errors import VersionError
from omni_cluster.vllm_engine.members import has_member

CHECKED_RAY = "2.60.0"
"""The version that `pyproject.toml` pins."""


def version_error(name: str) -> VersionError:
    return VersionError(
        f"Ray {__version__} has no {name}; omni_cluster was checked with Ray {CHECKED_RAY}, install that."
    )


try:
    from ray._private import worker
    from ray.experimental.internal_kv import _internal_kv_get as kv_get
    from ray.experimental.internal_kv import _internal_kv_list as kv_list
    from ray.experimental.internal_kv import _internal_kv_put as kv_put
    from ray.serve._private.client import ServeControllerClient
    from ray.serve._private.common import ReplicaID, ReplicaQueueLengthInfo
    from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY, SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
    from ray.serve._private.replica_result import ReplicaResult
    from ray.serve.context import _get_global_client as get_global_client
    from ray.serve.context import _get_serve_request_context as get_request_context
    from ray.serve.context import _RequestContext as RequestContext
    from ray.serve.context import _serve_request_context as request_context
    from ray.serve.context import _set_global_client as set_global_client
    from ray.serve.handle import DeploymentBroadcastResponse
    from ray.serve.request_router import RequestRouter
except ImportError as error:
    raise version_error(f"{error.name or 'ray'}: {error}") from error

PRIVATE: Mapping[Any, Sequence[str]] = {
    worker: (
        "_post_init_hooks",
        "global_worker_stdstream_dispatcher",
        "stderr_deduplicator",
        "stdout_deduplicator",
    ),
    ServeControllerClient: ("_controller",),
    RequestContext: ("_internal_request_id",),
    DeploymentBroadcastResponse: ("_fetch_replica_results_async",),  # transport.py
    RequestRouter: (  # routers.py, a router itself
        "_deployment_id",
        "_fulfill_next_pending_request",
        "_record_queue_wait_time",
        "_remove_pending_request_from_indices",
    ),
}
"""Private attributes that we call, override or read, and attributes of private modules, by what has them."""
KNOWN_WARNINGS = {
    # Each start says so of each machine, and the quick start says where the token is needed.
    "ray._private.authentication.authentication_token_setup": ("Token authentication is enabled for this Ray cluster",),
}
"""Warnings of Ray that mean nothing to an operator: how they begin, by the logger's name."""


def check_ray() -> None:
    """Raises VersionError naming the installed Ray and the first private name that it does not have."""
    for owner, names in PRIVATE.items():
        for name in names:
            if not has_member(owner, name):
                raise version_error(f"{owner.__name__}.{name}")


def once_ray_is_up(hook: Callable[[], None]) -> None:
    """Has Ray call `hook` at the end of `ray.init`, once however often it is asked."""
    if hook not in worker._post_init_hooks:
        worker._post_init_hooks.append(hook)


def print_no_more_logs() -> None:
    """What replicas and Ray's own actors log from now on stands in their files alone."""
    worker.global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")
    for held_back in (worker.stdout_deduplicator, worker.stderr_deduplicator):
        held_back.flush()  # what was said several times would be printed as Ray ends


def controller_of(client: ServeControllerClient) -> Any:
    """The actor of Serve's controller."""
    return client._controller


def context_without_parent() -> contextvars.Context:
    """A copy of this context in which Serve's calls are not calls of the request that is served here.

    As a request is cancelled, Serve cancels the tasks that give its calls to replicas, from another thread than theirs.
    That may meet a task of gRPC's in the step that sends the call: gRPC then takes the call for one that never was, and
    the replica works on it until garbage is collected here. A call that is made in this context is its caller's to end.
    """
    context = contextvars.copy_context()
    context.run(_forget_parent)
    return context


def _forget_parent() -> None:
    """The request's public id, which logs have, stays."""
    now = get_request_context()
    if now._internal_request_id:
        request_context.set(replace(now, _internal_request_id=""))
