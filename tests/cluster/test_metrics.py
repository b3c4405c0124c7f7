"""What replicas count on the page that Ray has for Prometheus, and the board's queries of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from typing import Any

import pytest

from omni_cluster.cluster import metrics
from omni_cluster.types.errors import StageDied
from tests.served.app import PATIENCE_S, ROOT, until
from tests.served.prometheus_server import expressions, needs_prometheus, prometheus

SHOWN_S = 180
"""Until the panels have data: Ray is given them every 5 s and sends them each 10 s, and a rate needs two samples."""
EXACT = ("tokens_total", "samples_total", "handover_seconds_sum", "handover_seconds_count", "request_seconds_sum")


@contextlib.asynccontextmanager
async def counting() -> AsyncIterator[Process]:
    """See `tests/cluster/counting.py`."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = (sys.executable, "-m", "tests.cluster.counting")
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment, stdin=PIPE, stdout=PIPE)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait_for(process.wait(), PATIENCE_S)


async def said(process: Process) -> Any:
    assert process.stdout is not None
    async for line in process.stdout:
        if line[:1] in (b"[", b"{"):
            return json.loads(line)
    raise AssertionError("it ended before it said anything")


class Pushed:
    """In place of `RayMetrics`: says when it is pushed."""

    def __init__(self) -> None:
        self.is_pushed = asyncio.Event()

    def push(self) -> None:
        self.is_pushed.set()


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The levels of what is logged; Serve's logger hands nothing on to pytest's."""
    levels: list[str] = []
    monkeypatch.setattr(metrics.logger, "handle", lambda record: levels.append(record.levelname))
    return levels


async def test_an_engine_that_does_not_answer_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(metrics, "PUSH_S", 0)
    errors: list[Exception] = [TimeoutError("no answer"), StageDied("it is gone")]

    async def refreshed() -> None:
        if errors:
            raise errors.pop(0)

    pushed = Pushed()
    pushing = asyncio.create_task(metrics.pushed_in_turn(pushed, refreshed))  # type: ignore[arg-type]
    await asyncio.wait_for(pushed.is_pushed.wait(), PATIENCE_S)
    pushing.cancel()
    assert logged == ["WARNING"] * 2


async def test_what_else_breaks_ends_it_with_a_line_in_the_log(logged: list[str]) -> None:
    async def refreshed() -> None:
        raise ValueError("a fault of ours")

    with pytest.raises(ValueError, match="a fault of ours"):
        await metrics.pushed_in_turn(Pushed(), refreshed)  # type: ignore[arg-type]
    assert logged == ["ERROR"]


@needs_prometheus
async def test_panels_of_ours_have_data_and_ray_has_the_sums_to_the_last() -> None:
    waiting = {query for queries in expressions().values() for query in queries if "ray_vllm_" not in query}
    async with counting() as process, prometheus({"ray": await said(process)}) as server:

        async def all_have_data() -> bool:
            waiting.difference_update([each for each in waiting if await server.has_data(each)])
            return not waiting

        try:
            await until(all_have_data, "every panel has data", SHOWN_S)
        finally:
            assert sorted(waiting) == []
        assert process.stdin is not None
        process.stdin.write(b"stop\n")
        counted = await said(process)

        async def sums_are_the_same() -> bool:
            names = {name: name if name.endswith("_total") else f"{name}_total" for name in EXACT}
            given = {name: await server.query(f"ray_omni_cluster_stage_{of_ray}") for name, of_ray in names.items()}
            return all(
                given[name] == {(): pytest.approx(counted[f"omni_cluster_stage_{name}"], rel=1e-9)} for name in EXACT
            )

        await until(sums_are_the_same, "Ray has what was counted", SHOWN_S)
