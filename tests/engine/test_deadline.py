"""A deadline: what it ends, and whose timeouts it leaves alone."""

from __future__ import annotations

import asyncio

import pytest

from omni_cluster.engine.deadline import Deadline, DeadlineExceeded


async def test_what_takes_too_long_is_ended_with_what_it_was_allowed() -> None:
    with pytest.raises(DeadlineExceeded, match=r"request_timeout_s = 0\.05;"):
        async with Deadline(0.05).kept():
            await asyncio.Event().wait()
    late = Deadline(0.0, "its header = 5")
    assert late.left_s == 0
    with pytest.raises(DeadlineExceeded, match="than its header = 5;"):
        async with late.kept():
            await asyncio.Event().wait()


async def test_another_timeout_inside_stays_what_it_is() -> None:
    with pytest.raises(TimeoutError):
        async with Deadline(60).kept():
            raise TimeoutError
