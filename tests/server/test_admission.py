"""A stream that would make others stand still: what its client is told, by the engines themselves."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import httpx
import pytest
import pytest_asyncio

from omni_cluster.engine.admission import Admission
from omni_cluster.engine.diffusion_engine import DiffusionEngine
from omni_cluster.engine.omni_llm import AsyncOmniLLM
from omni_cluster.engine.round_cost import RoundCost
from omni_cluster.models.family import StepTime
from omni_cluster.serve_local import listening, serving
from tests.engine.stages import PATIENCE_S, until, until_counts

QUESTION = [{"role": "user", "content": "Tell me."}]
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "Chelsie", "format": "pcm16"}, "seed": 3, "stream": True}
SLOW_STEP_S = 1_000.0
"""With it a second stream is expected to stand still for minutes."""


class Steps:
    """Steps of code2wav wait while they are held: a stream that was begun gets no sound."""

    def __init__(self, model: Any) -> None:
        self._step, self.may_go = model.step, threading.Event()
        self.may_go.set()

    def step(self, numbers: Sequence[int]) -> Any:
        assert self.may_go.wait(PATIENCE_S)
        return self._step(numbers)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(pipeline: AsyncOmniLLM) -> AsyncIterator[httpx.AsyncClient]:
    with listening("127.0.0.1", 0) as listener:
        async with serving(pipeline, listener) as server, httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            yield client


@pytest_asyncio.fixture(loop_scope="session")
async def code2wav(pipeline: AsyncOmniLLM) -> DiffusionEngine:
    stage = cast(DiffusionEngine, pipeline._stages["code2wav"])
    await until_counts(stage, running=0, waiting=0, streams=0)
    return stage


@pytest_asyncio.fixture(loop_scope="session")
async def steps(code2wav: DiffusionEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Steps]:
    model = await code2wav._call(lambda worker: worker.model_runner.model)  # type: ignore[arg-type]
    held = Steps(model)
    monkeypatch.setattr(model, "step", held.step)
    yield held
    held.may_go.set()


def limited(
    pipeline: AsyncOmniLLM, code2wav: DiffusionEngine, max_stall_s: float, monkeypatch: pytest.MonkeyPatch
) -> Admission:
    """The pipeline as if it had been started with this limit, on a slow card."""
    limits = pipeline.config.limits.model_copy(update={"max_stall_s": max_stall_s})
    config = pipeline.config.model_copy(update={"limits": limits})
    monkeypatch.setattr(pipeline, "bound", dataclasses.replace(pipeline.bound, config=config))
    cost = RoundCost(steps=9, max_frames=3_072)
    cost.stepped(StepTime(72, SLOW_STEP_S))
    door = Admission(max_stall_s, cost, time.monotonic)
    monkeypatch.setattr(code2wav, "_admission", door)
    return door


async def asked(client: httpx.AsyncClient, **options: Any) -> httpx.Response:
    body = {"model": "preset:tiny", "messages": QUESTION, **options}
    return await client.post("/v1/chat/completions", json=body)


async def until_heard(door: Admission) -> None:
    async def is_heard() -> bool:
        return bool(door._players)

    await until(is_heard)


async def until_somebody_waits(door: Admission) -> None:
    async def waits() -> bool:
        return door._turn.locked()

    await until(waits)


async def test_a_stream_that_would_make_another_stand_still_is_told_to_come_again(
    client: httpx.AsyncClient,
    pipeline: AsyncOmniLLM,
    code2wav: DiffusionEngine,
    steps: Steps,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    door = limited(pipeline, code2wav, 0.0, monkeypatch)
    steps.may_go.clear()
    first = asyncio.create_task(asked(client, **SPOKEN))
    await until_heard(door)
    begun = pipeline._metrics["thinker"].begin
    monkeypatch.setattr(pipeline._metrics["thinker"], "begin", lambda: pytest.fail("a stage began"))
    refused = await asked(client, **SPOKEN)
    monkeypatch.setattr(pipeline._metrics["thinker"], "begin", begun)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("too_many_voices", "rate_limit_error")
    assert "limits.max_stall_s = 0 s" in error["message"]
    assert (await asked(client, modalities=["text"], stream=True)).status_code == 200
    steps.may_go.set()
    assert "[DONE]" in (await first).text
    assert (await asked(client, **SPOKEN)).status_code == 200
    assert not door._players and not door._expected


async def test_a_stream_waits_until_the_others_have_sound_and_may_leave_meanwhile(
    client: httpx.AsyncClient,
    pipeline: AsyncOmniLLM,
    code2wav: DiffusionEngine,
    steps: Steps,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    door = limited(pipeline, code2wav, float(PATIENCE_S), monkeypatch)
    steps.may_go.clear()
    first = asyncio.create_task(asked(client, **SPOKEN))
    await until_heard(door)
    leaves = asyncio.create_task(asked(client, **SPOKEN))
    await until_somebody_waits(door)
    waits = asyncio.create_task(asked(client, **SPOKEN, n=1))
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    steps.may_go.set()
    one, other = await asyncio.gather(first, waits)
    assert one.status_code == other.status_code == 200 and "[DONE]" in other.text
    await until_counts(code2wav, running=0, waiting=0, streams=0)
    assert not door._players and not door._expected and not door._turn.locked()
