"""What `serve run deployments:app` starts."""

from omni_cluster.cluster.terminal import served_app as app

__all__ = ["app"]
