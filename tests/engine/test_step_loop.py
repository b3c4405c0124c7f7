"""The loop over steps with the tiny model in place of a worker: whatever the schedule, each answer is its own."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_cluster.config.schema import DiffusionConfig
from omni_cluster.engine.step_loop import LoopJob, StepLoop
from omni_cluster.engine.step_scheduler import Scheduler, StepCost, StepScheduler
from omni_cluster.inputs import OmniRequest
from omni_cluster.models.family import StepTime
from omni_cluster.models.qwen2_5_omni.code2wav_model import Code2WavModel
from omni_cluster.models.qwen2_5_omni.family import Qwen2_5Omni
from omni_cluster.models.qwen2_5_omni.voices import load_voices
from omni_cluster.outputs import StageChunk
from tests.engine.stages import PATIENCE_S, at_once

BLOCK = 12
CONFIG = DiffusionConfig(max_streams=2, max_piece_blocks=2, max_wait_ms=0)


class Ended(Exception):
    pass


class Broke(Exception):
    pass


class AtRandom:
    """Any of the jobs at any step: what no due time would give."""

    def __init__(self) -> None:
        self._random = random.Random(3)

    def choose(self, jobs: Sequence[LoopJob]) -> list[LoopJob]:
        return self._random.sample(list(jobs), self._random.randint(1, len(jobs))) if jobs else []

    def to_finish(self, ended: Sequence[LoopJob], others: bool) -> list[LoopJob]:
        return [] if others and self._random.random() < 0.5 else list(ended)

    def took(self, time: StepTime) -> None:
        pass


class Stage:
    """A loop and the model that it calls, in a thread of its own."""

    def __init__(self, model: Code2WavModel, folder: Path, scheduler: Scheduler[LoopJob]) -> None:
        self.model = model
        self._family = Qwen2_5Omni(folder)
        self._thread = ThreadPoolExecutor(1)
        self.loop = StepLoop(self.call, model.steps, model.sample_rate_hz, CONFIG, scheduler, Ended)
        self.task = asyncio.create_task(self.loop.run())

    async def call(self, method: str, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, getattr(self.model, method), *args)

    async def sound(
        self, name: str, seed: int, upstream: AsyncIterator[StageChunk], streams: bool = True
    ) -> np.ndarray:
        asked = OmniRequest(name, "", seed=seed, streams_audio=streams)
        session = self._family.diffusion_session("code2wav", asked, upstream, CONFIG)
        async with contextlib.aclosing(self.loop.waveforms(session)) as waveforms:
            return np.concatenate([samples async for samples in waveforms])

    async def until_free(self) -> None:
        async def free() -> None:
            while self.loop.counts() != {"running": 0, "waiting": 0, "streams": 0}:
                await asyncio.sleep(0)

        await asyncio.wait_for(free(), PATIENCE_S)

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self._thread.shutdown()


@pytest.fixture(scope="module")
def model(tiny: Path) -> Code2WavModel:
    return Code2WavModel(tiny, load_voices(tiny), torch.device("cpu"), CONFIG)


@pytest.fixture
async def stage(model: Code2WavModel, tiny: Path, request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    make: Callable[[], Scheduler[LoopJob]] = getattr(request, "param", AtRandom)
    made = Stage(model, tiny, make())
    yield made
    await made.end()


def by_slack() -> StepScheduler[LoopJob]:
    return StepScheduler(CONFIG.max_batch_frames, CONFIG.max_batch_size, StepCost(), time.monotonic)


def codes(count: int, seed: int) -> StageChunk:
    return StageChunk(0, tuple(int(c) for c in np.random.RandomState(seed).randint(0, 8192, count)))


@pytest.mark.parametrize("stage", [AtRandom, by_slack], indirect=True)
async def test_answers_at_once_sound_as_each_does_alone(stage: Stage) -> None:
    """More streams than may hold state, a whole answer, and one that breaks and one that cannot be made beside them."""
    asked = [("a", 40, True), ("b", 26, True), ("c", 13, True), ("d", 15, False)]
    alone = [await stage.sound(name, n, at_once([codes(n, n)]), streams) for name, n, streams in asked]

    async def broken() -> AsyncIterator[StageChunk]:
        yield codes(2 * BLOCK, 1)
        raise Broke

    made = await asyncio.gather(
        *(stage.sound(name, n, at_once([codes(n, n)]), streams) for name, n, streams in asked),
        stage.sound("broken", 1, broken()),
        stage.sound("bad", 1, at_once([StageChunk(0, (9000,))])),
        return_exceptions=True,
    )
    for one, expected in zip(made, alone, strict=False):
        assert isinstance(one, np.ndarray)
        np.testing.assert_allclose(one, expected, atol=1e-5, rtol=0)
    assert [type(error) for error in made[4:]] == [Broke, ValueError]
    await stage.until_free()
    assert not stage.model._pieces and not stage.model._streams


async def test_a_step_that_breaks_fails_its_jobs_and_the_loop_goes_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(numbers: Sequence[int]) -> StepTime | None:
        raise Broke

    with monkeypatch.context() as patch:
        patch.setattr(stage.model, "step", breaks)
        with pytest.raises(Broke):
            await asyncio.wait_for(stage.sound("a", 0, at_once([codes(30, 0)])), PATIENCE_S)
    await stage.until_free()
    assert not stage.model._pieces
    assert len(await stage.sound("a", 0, at_once([codes(14, 0)]))) == 14 * 480


async def test_jobs_that_cannot_be_finished_together_are_finished_one_by_one(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What broke it breaks alone."""
    finish, of_bad = stage.model.finish, 14 * 2

    def breaks(numbers: Sequence[int]) -> list[np.ndarray]:
        if any(stage.model._pieces[number].frames == of_bad for number in numbers):
            raise Broke
        return finish(numbers)

    monkeypatch.setattr(stage.model, "finish", breaks)
    monkeypatch.setattr(stage.loop._scheduler, "choose", list)
    monkeypatch.setattr(stage.loop._scheduler, "to_finish", lambda ended, others: [] if others else list(ended))
    good, bad = await asyncio.gather(
        stage.sound("good", 0, at_once([codes(5, 0)])),
        stage.sound("bad", 0, at_once([codes(14, 0)])),
        return_exceptions=True,
    )
    assert isinstance(good, np.ndarray) and len(good) == 5 * 480 and isinstance(bad, Broke)
    await stage.until_free()


async def test_the_end_of_the_loop_ends_what_runs_and_what_waits(stage: Stage) -> None:
    asked = [asyncio.create_task(stage.sound(f"s{i}", i, at_once([codes(60, i)]))) for i in range(4)]
    while not stage.loop.steps_made:
        await asyncio.sleep(0)
    stage.task.cancel()
    ended = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), PATIENCE_S)
    assert [type(error) for error in ended] == [Ended] * 4
