"""What `serve run deployments:app` starts."""

from omni_cluster.cluster.app import build_app as app

__all__ = ["app"]
