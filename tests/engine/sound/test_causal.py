"""A sound stage of one causal step: two codebooks, no voice, no seed, and a first piece that is shorter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from omni_cluster.engine.playback import Playback
from omni_cluster.engine.sound.loop import StepLoop
from omni_cluster.engine.sound.scheduler import Slack, StepCost, StepScheduler
from omni_cluster.types.codes import Codes
from omni_cluster.types.errors import JobFailed, SoundEngineStopped
from omni_cluster.types.outputs import StageChunk
from tests.engine.sound.causal import (
    CODEBOOKS,
    NO_CODES,
    NUM_CODES,
    PRIORS,
    SAMPLE_RATE_HZ,
    CausalModel,
    CausalOptions,
    CausalSession,
    samples_of,
)

CONFIG = CausalOptions(max_streams=3, max_wait_ms=0, max_batch_codes=40)


class Stage:
    """A loop over the model, as an engine runs it."""

    def __init__(self) -> None:
        self.model = CausalModel()
        cost, most, steps = StepCost(PRIORS.step, PRIORS.usual_sizes), CONFIG.max_step_size, self.model.steps
        scheduler = StepScheduler(most, CONFIG.max_batch_size, PRIORS, cost, time.monotonic)
        slack, stopped = Slack(steps, most, PRIORS, cost, time.monotonic), SoundEngineStopped("ended")
        self.loop = StepLoop(self.call, steps, SAMPLE_RATE_HZ, CONFIG, scheduler, lambda: stopped, slack)

    async def call(self, method: str, *args: Any) -> Any:
        await asyncio.sleep(0)
        return getattr(self.model, method)(*args)

    async def pieces(
        self,
        name: str,
        chunks: Sequence[np.ndarray],
        streams: bool = True,
        context: np.ndarray = NO_CODES,
        parts: int = 1,
    ) -> list[tuple[int, np.ndarray]]:
        session = CausalSession(name, one_by_one(chunks), streams, context)
        session.parts = parts
        return [piece async for piece in self.loop.waveforms(session, Playback())]


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    made = Stage()
    task = asyncio.create_task(made.loop.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def one_by_one(parts: Sequence[np.ndarray]) -> AsyncIterator[StageChunk]:
    """Each a chunk that comes twice."""
    start = 0
    for part in parts:
        chunk = StageChunk(codes=Codes.of(start, part) if len(part) else None)
        start += len(part)
        yield chunk
        yield chunk


def codes(count: int, seed: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, NUM_CODES, (count, CODEBOOKS)).astype(np.int16)


def cut(whole: np.ndarray, *sizes: int) -> list[np.ndarray]:
    return np.split(whole, np.cumsum(sizes))


@pytest.mark.parametrize("context", [0, 5])
@pytest.mark.parametrize("sizes", [(1,), (1, 1, 1), (2, 5, 3), (7,), ()])
async def test_pieces_lie_behind_each_other_and_are_the_whole(stage: Stage, sizes: Sequence[int], context: int) -> None:
    all_codes, before = codes(12, 1), codes(context, 2)
    ((start, whole),) = await stage.pieces("whole", [all_codes], streams=False, context=before)
    assert start == 0 and len(whole) == samples_of(12) == 93
    made = await stage.pieces("pieces", cut(all_codes, *sizes), context=before)
    assert [start for start, _ in made] == [0, *np.cumsum([len(wave) for _, wave in made])[:-1]]
    np.testing.assert_array_equal(np.concatenate([wave for _, wave in made]), whole)


async def test_requests_at_once_share_steps_and_sound_as_each_does_alone(stage: Stage) -> None:
    """More streams than may hold state, and a whole answer that is larger than a step may be."""
    asked = [(f"r{i}", cut(codes(10 + i, i), 1, 3), True) for i in range(6)] + [("whole", [codes(60, 9)], False)]
    alone = [await stage.pieces(*one) for one in asked]
    stage.model.batches.clear()
    together = await asyncio.gather(*(stage.pieces(*one) for one in asked))
    for made, wanted in zip(together, alone, strict=True):
        for (start, wave), (wanted_start, wanted_wave) in zip(made, wanted, strict=True):
            assert start == wanted_start
            np.testing.assert_array_equal(wave, wanted_wave)
    assert max(stage.model.batches) > 1
    while any(stage.loop.counts().values()):
        await asyncio.sleep(0)
    assert stage.model.is_empty()


async def test_a_whole_answer_in_parts_leaves_steps_to_others_and_no_step_is_larger_than_it_may_be(
    stage: Stage,
) -> None:
    long, short = codes(100, 1), codes(5, 2)
    ((_, wanted),) = await stage.pieces("alone", [long], streams=False)
    stage.model.batches.clear()
    stage.model.sizes.clear()
    ended: list[str] = []

    async def sound(name: str, made: np.ndarray, parts: int) -> np.ndarray:
        ((_, wave),) = await stage.pieces(name, [made], streams=False, parts=parts)
        ended.append(name)
        return wave

    whole, _ = await asyncio.gather(sound("long", long, 10), sound("short", short, 1))
    np.testing.assert_array_equal(whole, wanted)
    assert ended == ["short", "long"]
    assert max(stage.model.sizes) <= CONFIG.max_step_size and sum(stage.model.sizes) == 105


async def test_sound_of_another_length_than_its_job_states_fails_that_request_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    wave = stage.model._wave
    monkeypatch.setattr(stage.model, "_wave", lambda job, *rest: wave(job, *rest)[1 if job.stream == "short" else 0 :])
    short, good = await asyncio.gather(
        stage.pieces("short", [codes(4, 1)]), stage.pieces("good", [codes(4, 2)]), return_exceptions=True
    )
    assert isinstance(short, JobFailed) and str(short) == "a job of 29 samples of sound was given 28."
    assert isinstance(good, list) and len(good[0][1]) == 29
