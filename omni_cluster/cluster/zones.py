"""In which zone each node is: a label of Ray's nodes says it, which Serve's open-source part hands on to no router."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping

import ray
from ray.exceptions import RayError

logger = logging.getLogger("ray.serve")

LABEL = "ray.io/availability-zone"
"""Ray sets it from RAY_NODE_ZONE in the environment in which the node starts."""
THREAD = "zones"

_zones: Mapping[str, str] = {}


def zone_of(node: str) -> str:
    """The node's zone; "" where it has none, and as long as it is not known here."""
    return _zones.get(node, "")


def learn_zones(nodes: Collection[str]) -> None:
    """Asks Ray if one of the nodes is not known here. In a thread of its own: the head may take long to answer."""
    if not _zones.keys() >= set(nodes):
        threading.Thread(target=ask_for_zones, name=THREAD, daemon=True).start()


def ask_for_zones() -> None:
    """Replaces what is known here; what Ray does not answer is asked again when replicas come or go."""
    global _zones
    try:
        _zones = {node["NodeID"]: node["Labels"].get(LABEL, "") for node in ray.nodes()}
    except RayError as error:
        logger.warning("Ray does not say in which zones its nodes are: %s", error)
