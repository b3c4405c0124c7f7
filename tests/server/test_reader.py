"""Where bodies are worked on: what takes long for one keeps no other waiting."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from omni_cluster.config.loader import load_config
from omni_cluster.engine.build import bind
from omni_cluster.models.registry import known_families
from omni_cluster.server.reader import LARGE_THREADS, SMALL_BODY_BYTES, Reader

PATIENCE_S = 60


async def test_prompts_of_large_bodies_keep_no_small_one_waiting(tiny: Path) -> None:
    reader, may_end = Reader(bind(load_config(None, known_families=known_families()))), threading.Event()
    large = [
        asyncio.ensure_future(reader.off_loop(lambda: may_end.wait(PATIENCE_S), SMALL_BODY_BYTES + 1))
        for _ in range(10 * LARGE_THREADS)
    ]
    try:
        small = reader.off_loop(lambda: "rendered", SMALL_BODY_BYTES)
        assert await asyncio.wait_for(small, PATIENCE_S / 2) == "rendered"
        assert not any(each.done() for each in large)
    finally:
        may_end.set()
    assert all(await asyncio.gather(*large))
    await reader.close()
