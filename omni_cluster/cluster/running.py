"""Replicas that run, by application and deployment, as the routers of this process know them.

Apart from the router: Serve sends its class, with copies of its module's variables, to every process that calls. What
is here is not copied.
"""

from __future__ import annotations

from collections.abc import Mapping

_running: dict[tuple[str, str], dict[str, str]] = {}


def set_running(app_name: str, deployment_name: str, nodes: Mapping[str, str]) -> None:
    """What a router of the deployment has just learnt: Ray's id of the node of each replica, by the replicas' ids."""
    _running[app_name, deployment_name] = dict(sorted(nodes.items()))


def known_replicas(app_name: str, deployment_name: str) -> Mapping[str, str] | None:
    """The nodes of the replicas that run, by their ids; None as long as this process has called none of them."""
    return _running.get((app_name, deployment_name))
