"""What `omni-cluster bench` refuses."""

from __future__ import annotations

from omni_cluster.types.errors import OmniError


class BenchError(OmniError):
    """A measurement that cannot begin, or a result that cannot be read or compared."""
