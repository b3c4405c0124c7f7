"""The vocoder through the sound engine's loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_cluster.engine.playback import Playback
from omni_cluster.engine.sound.loop import StepLoop
from omni_cluster.engine.sound.scheduler import Slack, StepCost, StepScheduler
from omni_cluster.models.qwen3_omni.code2wav import Code2WavSession
from omni_cluster.models.qwen3_omni.code2wav_model import Code2WavModel
from omni_cluster.models.qwen3_omni.vocoder import load_vocoder
from omni_cluster.models.sound import LinearCost, SoundJob, SoundPriors
from omni_cluster.types.codes import Codes
from omni_cluster.types.errors import NotFinite, PayloadError, SoundEngineStopped
from omni_cluster.types.inputs import KnownOutput, OmniRequest
from omni_cluster.types.outputs import StageChunk
from tests.engine.sound.causal import CausalOptions
from tests.engine.stages import at_once

CPU = torch.device("cpu")
OPTIONS = CausalOptions(max_streams=2, max_wait_ms=0, max_batch_codes=40)
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


class Stage:
    """A loop over the model, as an engine runs it."""

    def __init__(self, folder: Path) -> None:
        vocoder = load_vocoder(folder, CPU, torch.float64)
        self.model, self.reach, self.batches = Code2WavModel(vocoder, CPU), vocoder.reach, [0]
        cost, most = StepCost(PRIORS.step, PRIORS.usual_sizes), OPTIONS.max_step_size
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

    async def sound(self, name: str, codes: np.ndarray, most: int, delivered: int = 0) -> list[tuple[int, np.ndarray]]:
        """In pieces of so many codes at most; 0: whole."""
        known = {"code2wav": KnownOutput(num_samples=delivered)}
        request = OmniRequest(name, "", streams_audio=most > 0, known=known)
        upstream = at_once([StageChunk(codes=Codes.of(0, codes)), StageChunk(finish_reason="stop")])
        session = Code2WavSession(request, upstream, self.reach, 256, 4, most)
        return [piece async for piece in self.loop.waveforms(session, Playback())]


@pytest.fixture
async def stage(qwen3_folder: Path) -> AsyncIterator[Stage]:
    made = Stage(qwen3_folder)
    task = asyncio.create_task(made.loop.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def codes_of(count: int, seed: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (count, 4)).astype(np.int16)


def whole(model: Any, codes: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return model.code2wav(torch.from_numpy(codes.astype(np.int64)).T[None])[0, 0].numpy()


async def test_streams_at_once_and_whole_answers_are_transformers(stage: Stage, qwen3_reference: Any) -> None:
    """More streams than may hold state, and a whole answer that is larger than a step may be."""
    asked = [
        (codes_of(15, 0), 4),
        (codes_of(14, 1), 14),
        (codes_of(6, 2), 3),
        (codes_of(22, 3), 9),
        (codes_of(45, 4), 0),
    ]
    made = await asyncio.gather(*(stage.sound(f"r{i}", *each) for i, each in enumerate(asked)))
    for pieces, (codes, most) in zip(made, asked, strict=True):
        assert [start for start, _ in pieces] == [stage.reach.samples(most * i) for i in range(len(pieces))]
        sound, wanted = np.concatenate([wave for _, wave in pieces]), whole(qwen3_reference, codes)
        assert sound.dtype == np.float32 and len(sound) == len(wanted)
        assert np.abs(sound - wanted).max() < 1e-5
    assert max(stage.batches) > 1
    while any(stage.loop.counts().values()):
        await asyncio.sleep(0)
    assert not (stage.model._pieces or stage.model._streams)


async def test_a_stream_that_is_begun_again_goes_on_exactly(stage: Stage, qwen3_reference: Any) -> None:
    codes = codes_of(33, 5)
    wanted, delivered = whole(qwen3_reference, codes), 1920 * 18 - 555
    for start, wave in await stage.sound("again", codes, 5, delivered):
        if start + len(wave) > delivered:
            assert np.abs(wave - wanted[start : start + len(wave)]).max() < 1e-5
    assert start + len(wave) == len(wanted)


def test_invalid_codes_are_refused_before_anything_is_begun(qwen3_folder: Path) -> None:
    model = Code2WavModel(load_vocoder(qwen3_folder, CPU, torch.float32), CPU)
    with pytest.raises(PayloadError, match="256 among them"):
        model.begin(1, SoundJob(np.full((1, 4), 256), range(1365), size=1, stream="s"))
    assert not (model._pieces or model._streams)


def test_sound_that_is_no_number_is_an_error_and_the_jobs_stay(qwen3_folder: Path) -> None:
    vocoder = load_vocoder(qwen3_folder, CPU, torch.float32)
    vocoder._work.code_rows.embedding.weight.data[5] = torch.inf
    model = Code2WavModel(vocoder, CPU)
    for number, code in ((1, 5), (2, 6)):
        model.begin(number, SoundJob(np.full((1, 4), code), range(1365), size=1))
    model.step([1, 2])
    with pytest.raises(NotFinite):
        model.finish([1, 2])
    assert [len(wave) for wave in model.finish([2])] == [1365]
