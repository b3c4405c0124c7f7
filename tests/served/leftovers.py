"""What requests may leave behind: in engines, and in Ray's stores."""

from __future__ import annotations

import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

KEPT = ("running", "waiting", "held", "kv_blocks_used", "held_blocks", "row_counts", "streams")
"""What an engine's counts say that it holds of requests."""


def store_bytes(*, kept: bool = False) -> int:
    """What all stores hold. `kept`: without what Ray drops as soon as it needs the room."""
    address = ray.get_runtime_context().gcs_address
    stats = get_memory_info_reply(get_state_from_address(address)).store_stats
    return int(stats.object_store_bytes_primary_copy if kept else stats.object_store_bytes_used)
