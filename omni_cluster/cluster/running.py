"""Replicas that run, by application and deployment, as the routers of this process know them.

Apart from the router: Serve sends its class, with copies of its module's variables, to every process that calls. What
is here is not copied.
"""

from __future__ import annotations

from collections.abc import Iterable

_running: dict[tuple[str, str], list[str]] = {}


def tell_running(app_name: str, deployment_name: str, replica_ids: Iterable[str]) -> None:
    """What a router of the deployment has just learnt."""
    _running[app_name, deployment_name] = sorted(replica_ids)


def known_replicas(app_name: str, deployment_name: str) -> list[str]:
    """The ids of the replicas that run; none as long as this process has called none of them."""
    return _running.get((app_name, deployment_name), [])
