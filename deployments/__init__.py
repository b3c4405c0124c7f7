"""`deployments:app` for `serve run`, with a configuration or without; `deployments:default` for `serve build`."""

from __future__ import annotations

from omni_cluster.cluster.app import bind_app, config_of
from omni_cluster.cluster.local import served_app as app

__all__ = ["app", "default"]


def __getattr__(name: str) -> object:
    """`default`: the application of the embedded configuration, made when it is asked for."""
    if name != "default":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return bind_app(config_of({}))
