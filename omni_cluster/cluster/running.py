"""Replicas that run, by application and deployment, as the routers of this process know them.

Apart from the router: Serve sends its class, with copies of its module's variables, to every process that calls. What
is here is not copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Where a replica runs, by Ray's id of the node; the zone is "" where Serve says none. See `zones`."""

    node: str
    zone: str = ""


_running: dict[tuple[str, str], dict[str, Place]] = {}


def tell_running(app_name: str, deployment_name: str, places: Mapping[str, Place]) -> None:
    """What a router of the deployment has just learnt: its replicas' places, by their ids."""
    _running[app_name, deployment_name] = dict(sorted(places.items()))


def known_replicas(app_name: str, deployment_name: str) -> Mapping[str, Place] | None:
    """The replicas that run, by their ids; None as long as this process has called none of them."""
    return _running.get((app_name, deployment_name))
