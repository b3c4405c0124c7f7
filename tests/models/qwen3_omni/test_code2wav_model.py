"""The vocoder through the sound engine's loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_cluster.config.schema import SoundOptions
from omni_cluster.engine.playback import Playback
from omni_cluster.engine.sound.loop import StepLoop
from omni_cluster.engine.sound.scheduler import Slack, StepCost, StepScheduler
from omni_cluster.models.qwen3_omni.code2wav_model import Code2WavModel
from omni_cluster.models.qwen3_omni.vocoder import Reach, load_vocoder
from omni_cluster.models.sound import LinearCost, SoundJob, SoundPriors
from omni_cluster.types.errors import NotFinite, PayloadError, SoundEngineStopped

CPU = torch.device("cpu")
OPTIONS = SoundOptions(max_streams=2, max_wait_ms=0, max_batch_frames=40)
PRIORS = SoundPriors(
    step=LinearCost(1e-3, 1e-4),
    finish=LinearCost(1e-4, 0.0),
    usual_sizes=(1, 40),
    worth_finishing=20,
    finish_ahead_s=0.01,
    newcomer_steps=1,
    piece_size=5.0,
    cushion_s=0.05,
)


class Pieces:
    """A `SoundSession` of the given pieces, or of all their codes at once."""

    def __init__(self, name: str, parts: Sequence[np.ndarray], reach: Reach, streams: bool) -> None:
        self._stream, self._reach = name if streams else None, reach
        self._parts = parts if streams else [np.concatenate(parts)]
        self._job: SoundJob | None = None

    async def jobs(self) -> AsyncIterator[SoundJob]:
        start = 0
        for part in self._parts:
            end = start + len(part)
            samples = range(self._reach.samples(start), self._reach.samples(end))
            self._job = SoundJob(part, samples, size=len(part), stream=self._stream)
            yield self._job
            start = end

    def latest(self) -> SoundJob:
        assert self._job is not None
        return self._job


class Stage:
    """A loop over the model, as an engine runs it."""

    def __init__(self, folder: Path) -> None:
        vocoder = load_vocoder(folder, CPU, torch.float64)
        self.model, self.reach, self.batches = Code2WavModel(vocoder, CPU), vocoder.reach, [0]
        cost, most = StepCost(PRIORS.step, PRIORS.usual_sizes), OPTIONS.max_batch_frames
        scheduler = StepScheduler(most, OPTIONS.max_batch_size, PRIORS, cost, time.monotonic)
        slack = Slack(1, most, PRIORS, cost, time.monotonic)
        self.loop = StepLoop(
            self.call, 1, 24_000, OPTIONS, scheduler, lambda: SoundEngineStopped("ended"), slack
        )  # fmt: skip

    async def call(self, method: str, *args: Any) -> Any:
        await asyncio.sleep(0)
        if method == "step":
            self.batches.append(len(args[0]))
        return getattr(self.model, method)(*args)

    async def sound(self, name: str, parts: Sequence[np.ndarray], streams: bool = True) -> np.ndarray:
        made = self.loop.waveforms(Pieces(name, parts, self.reach, streams), Playback())
        return np.concatenate([wave async for _, wave in made])


@pytest.fixture
async def stage(qwen3_folder: Path) -> AsyncIterator[Stage]:
    made = Stage(qwen3_folder)
    task = asyncio.create_task(made.loop.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def parts_of(seed: int, *sizes: int) -> list[np.ndarray]:
    codes = np.random.RandomState(seed).randint(0, 256, (sum(sizes), 4)).astype(np.int16)
    return np.split(codes, np.cumsum(sizes)[:-1])


async def test_streams_at_once_and_whole_answers_are_transformers(stage: Stage, qwen3_reference: Any) -> None:
    """More streams than may hold state, and a whole answer that is larger than a step may be."""
    asked = {"a": (1, 2, 4, 8), "b": (14,), "c": (3, 3), "d": (1, 1, 20), "whole": (45,)}
    parts = {name: parts_of(seed, *sizes) for seed, (name, sizes) in enumerate(asked.items())}
    made = await asyncio.gather(*(stage.sound(name, each, name != "whole") for name, each in parts.items()))
    for sound, each in zip(made, parts.values(), strict=True):
        codes = torch.from_numpy(np.concatenate(each).astype(np.int64)).T[None]
        with torch.inference_mode():
            wanted = qwen3_reference.code2wav(codes)[0, 0].numpy()
        assert sound.dtype == np.float32 and len(sound) == len(wanted)
        assert np.abs(sound - wanted).max() < 1e-5
    assert max(stage.batches) > 1
    while any(stage.loop.counts().values()):
        await asyncio.sleep(0)
    assert not (stage.model._pieces or stage.model._streams)


def test_invalid_codes_are_refused_before_anything_is_begun(qwen3_folder: Path) -> None:
    model = Code2WavModel(load_vocoder(qwen3_folder, CPU, torch.float32), CPU)
    with pytest.raises(PayloadError, match="256 among them"):
        model.begin(1, SoundJob(np.full((1, 4), 256), range(1365), size=1, stream="s"))
    assert not (model._pieces or model._streams)


def test_sound_that_is_no_number_is_an_error_and_the_jobs_stay(qwen3_folder: Path) -> None:
    vocoder = load_vocoder(qwen3_folder, CPU, torch.float32)
    vocoder._model.code_embedding.weight.data[5] = torch.inf
    model = Code2WavModel(vocoder, CPU)
    for number, code in ((1, 5), (2, 6)):
        model.begin(number, SoundJob(np.full((1, 4), code), range(1365), size=1))
    model.step([1, 2])
    with pytest.raises(NotFinite):
        model.finish([1, 2])
    assert [len(wave) for wave in model.finish([2])] == [1365]
