"""The vocoder through the sound engine's loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_cluster.engine.playback import Playback
from omni_cluster.engine.sound.loop import StepLoop
from omni_cluster.engine.sound.scheduler import AnyJob, Slack, StepCost, StepScheduler
from omni_cluster.models.qwen3_omni.code2wav_model import Code2WavModel
from omni_cluster.models.qwen3_omni.code2wav_stage import Code2Wav
from omni_cluster.models.qwen3_omni.options import Code2WavOptions
from omni_cluster.models.qwen3_omni.vocoder import load_vocoder
from omni_cluster.models.sound import SoundJob
from omni_cluster.types.codes import Codes
from omni_cluster.types.errors import JobFailed, NotFinite, PayloadError, SoundEngineStopped
from omni_cluster.types.inputs import KnownOutput, OmniRequest
from omni_cluster.types.outputs import StageChunk
from tests.engine.stages import at_once

CPU = torch.device("cpu")
OPTIONS = Code2WavOptions(max_streams=2, max_wait_ms=0, max_batch_codes=120)


@dataclass
class Checkpoint:
    folder: Path


class Together(StepScheduler):
    """All jobs at once, whatever steps cost."""

    def choose(self, jobs: Sequence[AnyJob]) -> list[AnyJob]:
        return list(jobs)


class Stage:
    """A loop over the model, as an engine runs it."""

    def __init__(self, folder: Path, chooses: type[StepScheduler] = StepScheduler) -> None:
        self.spec = Code2Wav(Checkpoint(folder))
        self.model, self.batches = Code2WavModel(load_vocoder(folder, CPU, torch.float64), CPU), [0]
        self.calls: Counter[str] = Counter()
        priors, most = self.spec.priors, OPTIONS.max_step_size
        cost = StepCost(priors.step, priors.usual_sizes)
        scheduler = chooses(most, OPTIONS.max_batch_size, priors, cost, time.monotonic)
        slack = Slack(1, most, priors, cost, time.monotonic)
        self.loop = StepLoop(
            self.call, 1, self.spec.sample_rate_hz, OPTIONS, scheduler, lambda: SoundEngineStopped("ended"), slack
        )  # fmt: skip

    async def call(self, method: str, *args: Any) -> Any:
        await asyncio.sleep(0)
        self.calls[method] += 1
        if method == "step":
            self.batches.append(len(args[0]))
        try:
            return getattr(self.model, method)(*args)
        except RuntimeError as error:
            raise JobFailed(str(error)) from error

    async def pieces(
        self, name: str, upstream: AsyncIterator[StageChunk], most: int, delivered: int = 0
    ) -> AsyncIterator[tuple[int, np.ndarray]]:
        """In pieces of so many codes at most; 0: whole."""
        known = {"code2wav": KnownOutput(num_samples=delivered)}
        request = OmniRequest(name, "", streams_audio=most > 0, known=known)
        options = OPTIONS.model_copy(update={"max_piece_codes": most})
        session = self.spec.session(request, upstream, options)
        async with contextlib.aclosing(self.loop.waveforms(session, Playback())) as waveforms:
            async for piece in waveforms:
                yield piece

    async def sound(self, name: str, codes: np.ndarray, most: int, delivered: int = 0) -> list[tuple[int, np.ndarray]]:
        return [piece async for piece in self.pieces(name, all_of(codes), most, delivered)]

    async def until_free(self) -> None:
        while any(self.loop.counts().values()):
            await asyncio.sleep(0)

    @property
    def is_empty(self) -> bool:
        return not (self.model._pieces or self.model._streams)


def all_of(codes: np.ndarray) -> AsyncIterator[StageChunk]:
    return at_once([StageChunk(codes=Codes.of(0, codes)), StageChunk(finish_reason="stop")])


@pytest.fixture
async def stage(qwen3_folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    made = Stage(qwen3_folder, getattr(request, "param", StepScheduler))
    task = asyncio.create_task(made.loop.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def codes_of(count: int, seed: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (count, 4)).astype(np.int16)


def samples(codes: int) -> int:
    return max(0, 1920 * codes - 555)


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
        (codes_of(145, 4), 0),
    ]
    made = await asyncio.gather(*(stage.sound(f"r{i}", *each) for i, each in enumerate(asked)))
    for pieces, (codes, most) in zip(made, asked, strict=True):
        assert [start for start, _ in pieces] == [samples(most * i) for i in range(len(pieces))]
        sound, wanted = np.concatenate([wave for _, wave in pieces]), whole(qwen3_reference, codes)
        assert sound.dtype == np.float32 and len(sound) == len(wanted)
        assert np.abs(sound - wanted).max() < 1e-5
    assert max(stage.batches) > 1
    await stage.until_free()
    assert stage.is_empty


@pytest.mark.parametrize("stage", [Together], indirect=True)
async def test_long_streams_of_all_ages_are_one_decode_each_though_a_step_fails_and_one_leaves(
    stage: Stage, qwen3_reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the 300 codes at which transformers' own `chunked_decode` makes seams."""
    asked = {"old": codes_of(330, 6), "young": codes_of(310, 7)}
    is_half = asyncio.Event()

    async def sound(name: str, codes: np.ndarray) -> np.ndarray:
        waves = []
        async for start, wave in stage.pieces(name, all_of(codes), 16):
            waves.append(wave)
            if name == "old" and start > samples(150):
                is_half.set()
        return np.concatenate(waves)

    old = asyncio.create_task(sound("old", asked["old"]))
    await is_half.wait()
    run = stage.model._vocoder._passes._run
    failures = iter([True, False, True])

    def failing(states: Any, codes: Any) -> Any:
        made = run(states, codes)
        if len(states) > 1 and next(failures, False):
            raise RuntimeError("out of memory")
        return made

    monkeypatch.setattr(stage.model._vocoder._passes, "_run", failing)
    made = await asyncio.gather(old, sound("young", asked["young"]))
    assert next(failures, None) is None
    for wave, codes in zip(made, asked.values(), strict=True):
        assert np.abs(wave - whole(qwen3_reference, codes)).max() < 1e-5


async def test_a_stream_that_is_left_is_forgotten_and_its_name_begins_anew(stage: Stage, qwen3_reference: Any) -> None:
    """Two may run at once: that of a client that left would hold up the third for ever."""
    codes = codes_of(40, 8)
    for _ in range(3):
        async for _piece in stage.pieces("left", all_of(codes_of(300, 9)), 4):
            break
    made = await stage.sound("left", codes, 4)
    assert np.abs(np.concatenate([wave for _, wave in made]) - whole(qwen3_reference, codes)).max() < 1e-5
    await stage.until_free()
    assert stage.is_empty and stage.calls["forget"] >= 4


async def test_a_long_answer_leaves_steps_to_others(stage: Stage) -> None:
    """Its codes go through many passes; one stream begins after it and has ended before it."""
    ended: list[str] = []

    async def sound(name: str, count: int, most: int) -> None:
        await stage.sound(name, codes_of(count, 1), most)
        ended.append(name)

    long = asyncio.create_task(sound("long", 64 * 20, 0))
    while not stage.calls["step"]:
        await asyncio.sleep(0)
    await sound("short", 8, 8)
    await long
    assert ended == ["short", "long"] and stage.calls["step"] >= 20


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
