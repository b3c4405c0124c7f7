"""The loop over steps with the tiny model in place of a worker: whatever the schedule, each answer is its own."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_cluster.engine.playback import Playback
from omni_cluster.engine.sound.jobs import LoopJob
from omni_cluster.engine.sound.loop import StepLoop
from omni_cluster.engine.sound.scheduler import AnyJob, Slack, StepCost, StepScheduler
from omni_cluster.models.progress import Progress
from omni_cluster.models.qwen2_5_omni.code2wav_model import Code2WavModel
from omni_cluster.models.qwen2_5_omni.family import Qwen2_5Omni
from omni_cluster.models.qwen2_5_omni.options import Code2WavOptions
from omni_cluster.models.qwen2_5_omni.stages import Code2Wav
from omni_cluster.models.qwen2_5_omni.voices import load_voices
from omni_cluster.models.sound import SoundJob, StepTime
from omni_cluster.types.errors import JobFailed, SoundEngineStopped, TokenError
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk
from tests.codes import codes_chunk
from tests.engine.stages import PATIENCE_S, at_once

BLOCK = 12
CONFIG = Code2WavOptions(max_streams=2, max_piece_blocks=2, max_wait_ms=0)


class Broke(JobFailed):
    """What a worker's call raises for a job that cannot be made."""


class AtRandom(StepScheduler):
    """Any of the jobs at any step: what no due time would give."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._random = random.Random(3)

    def choose(self, jobs: Sequence[AnyJob]) -> list[AnyJob]:
        return self._random.sample(list(jobs), self._random.randint(1, len(jobs))) if jobs else []

    def to_finish(self, ended: Sequence[AnyJob], others: bool) -> list[AnyJob]:
        return [] if others and self._random.random() < 0.5 else list(ended)


class Stage:
    """A loop and the model that it calls, in a thread of its own."""

    def __init__(self, model: Code2WavModel, folder: Path, chooses: type[StepScheduler], *, overlaps: bool) -> None:
        self.model = model
        self._spec = Code2Wav(Qwen2_5Omni(folder))
        priors, most = self._spec.priors, CONFIG.max_batch_frames
        cost = StepCost(priors.step, priors.usual_sizes)
        self._thread = ThreadPoolExecutor(1)
        self.loop = StepLoop(
            self.call,
            model.steps,
            self._spec.sample_rate_hz,
            CONFIG,
            chooses(most, CONFIG.max_batch_size, priors, cost, time.monotonic),
            lambda: SoundEngineStopped("ended"),
            Slack(model.steps, most, priors, cost, time.monotonic),
            overlaps=overlaps,
        )
        self.task = asyncio.create_task(self.loop.run())

    async def call(self, method: str, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, getattr(self.model, method), *args)

    async def sound(
        self, name: str, seed: int, upstream: AsyncIterator[StageChunk], streams: bool = True
    ) -> np.ndarray:
        asked = OmniRequest(name, "", seed=seed, streams_audio=streams)
        session = self._spec.session(asked, upstream, CONFIG)
        async with contextlib.aclosing(self.loop.waveforms(session, Playback())) as waveforms:
            return np.concatenate([samples async for _, samples in waveforms])

    async def until_free(self) -> None:
        async def free() -> None:
            while any(self.loop.counts().values()):
                await asyncio.sleep(0)

        await asyncio.wait_for(free(), PATIENCE_S)

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self._thread.shutdown()
        self.model.drop(list(self.model._pieces))  # the module's tests share it
        self.model.forget(list(self.model._streams))


@pytest.fixture(scope="module")
def model(tiny: Path) -> Code2WavModel:
    return Code2WavModel(tiny, load_voices(tiny), torch.device("cpu"), CONFIG)


@pytest.fixture(params=[False, True], ids=["in turns", "overlaps"])
def overlaps(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
async def stage(
    model: Code2WavModel, tiny: Path, overlaps: bool, request: pytest.FixtureRequest
) -> AsyncIterator[Stage]:
    made = Stage(model, tiny, getattr(request, "param", AtRandom), overlaps=overlaps)
    yield made
    await made.end()


def codes(count: int, seed: int) -> StageChunk:
    return codes_chunk(0, (int(c) for c in np.random.RandomState(seed).randint(0, 8192, count)))


@pytest.mark.parametrize("stage", [AtRandom, StepScheduler], indirect=True)
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
        stage.sound("bad", 1, at_once([codes_chunk(0, (9000,))])),
        return_exceptions=True,
    )
    for one, expected in zip(made, alone, strict=False):
        assert isinstance(one, np.ndarray)
        np.testing.assert_allclose(one, expected, atol=1e-5, rtol=0)
    assert [type(error) for error in made[4:]] == [Broke, TokenError]
    await stage.until_free()
    assert not stage.model._pieces and not stage.model._streams


async def test_a_request_that_leaves_while_another_is_dropped_keeps_no_place_in_the_model(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not been begun, and its stream is forgotten at once: begun after that, it would be there for ever."""
    on_loop = asyncio.get_running_loop()
    step, drop, others = stage.model.step, stage.model.drop, []

    async def come_and_let_the_first_leave() -> None:
        others.append(asyncio.create_task(stage.sound("second", 2, at_once([codes(30, 2)]))))
        while not stage.loop.counts()["waiting"]:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    async def leave() -> None:
        others[0].cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def busy_step(numbers: Sequence[int], ending: Sequence[int]) -> Any:
        if not others:
            asyncio.run_coroutine_threadsafe(come_and_let_the_first_leave(), on_loop).result(PATIENCE_S)
        return step(numbers, ending)

    def slow_drop(numbers: Sequence[int]) -> None:
        asyncio.run_coroutine_threadsafe(leave(), on_loop).result(PATIENCE_S)
        drop(numbers)

    monkeypatch.setattr(stage.model, "step", busy_step)
    monkeypatch.setattr(stage.model, "drop", slow_drop)
    first = asyncio.create_task(stage.sound("first", 1, at_once([codes(40, 1)])))
    await asyncio.gather(first, return_exceptions=True)
    await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), PATIENCE_S)
    await stage.until_free()
    assert others[0].cancelled() and not stage.model._streams and not stage.model._pieces


async def test_a_fault_of_the_loop_is_logged(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    def faulty(_: Sequence[LoopJob]) -> list[LoopJob]:
        raise ZeroDivisionError("of the schedule")

    stage.loop._scheduler.choose = faulty  # type: ignore[method-assign]
    with pytest.raises(SoundEngineStopped):
        await stage.sound("any", 1, at_once([codes(5, 1)]))
    assert "ended by a fault" in caplog.text and "of the schedule" in caplog.text


@pytest.mark.parametrize("method", ["step", "finish"])
async def test_jobs_that_break_together_are_made_one_by_one_and_the_one_that_breaks_fails_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    wanted = await stage.sound("good", 0, at_once([codes(5, 0)]))
    make, of_bad, broke = getattr(stage.model, method), 14 * 2, []

    def breaks(numbers: Sequence[int], *ending: Sequence[int]) -> Any:
        if any(stage.model._pieces[number].frames == of_bad for number in numbers):
            broke.append(len(numbers))
            raise Broke
        return make(numbers, *ending)

    monkeypatch.setattr(stage.model, method, breaks)
    monkeypatch.setattr(stage.loop._scheduler, "choose", list)
    monkeypatch.setattr(stage.loop._scheduler, "to_finish", lambda ended, others: [] if others else list(ended))
    good, bad = await asyncio.gather(
        stage.sound("good", 0, at_once([codes(5, 0)])),
        stage.sound("bad", 0, at_once([codes(14, 0)])),
        return_exceptions=True,
    )
    assert isinstance(bad, Broke) and broke == [2, 1]
    np.testing.assert_allclose(good, wanted, atol=1e-5, rtol=0)  # type: ignore[arg-type]
    await stage.until_free()
    assert not stage.model._pieces and not stage.model._streams


async def test_sound_that_breaks_beside_a_step_leaves_the_steps_job(
    stage: Stage, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The good answer comes during the bad one's first step, and so has a step left as the bad one's sound is made."""
    wanted = await stage.sound("good", 0, at_once([codes(50, 0)]), streams=False)
    on_loop = asyncio.get_running_loop()
    step, vocode, good, broke = stage.model.step, stage.model._vocode, [], []

    async def come() -> None:
        good.append(asyncio.create_task(stage.sound("good", 0, at_once([codes(50, 0)]), streams=False)))
        while not stage.loop.counts()["waiting"]:
            await asyncio.sleep(0)

    def busy_step(numbers: Sequence[int], ending: Sequence[int]) -> Any:
        if not good:
            asyncio.run_coroutine_threadsafe(come(), on_loop).result(PATIENCE_S)
        return step(numbers, ending)

    def breaks(pieces: Any, windows: Any) -> Any:
        if any(piece.frames == 17 * 2 for piece in pieces):
            broke.append(len(pieces))
            raise Broke
        return vocode(pieces, windows)

    monkeypatch.setattr(stage.model, "step", busy_step)
    monkeypatch.setattr(stage.model, "_vocode", breaks)
    monkeypatch.setattr(stage.loop._scheduler, "choose", list)
    monkeypatch.setattr(stage.loop._scheduler, "to_finish", lambda ended, others: list(ended))
    with pytest.raises(Broke):
        await stage.sound("bad", 0, at_once([codes(17, 0)]), streams=False)
    np.testing.assert_allclose(await asyncio.wait_for(good[0], PATIENCE_S), wanted, atol=1e-5, rtol=0)
    assert broke == ([1, 1] if overlaps else [1])
    await stage.until_free()
    assert not stage.model._pieces and not stage.model._streams


async def test_a_model_that_can_be_called_no_more_ends_the_loop_at_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def breaks(numbers: Sequence[int], ending: Sequence[int]) -> StepTime | None:
        calls.append(numbers)
        raise SoundEngineStopped("the device broke")

    monkeypatch.setattr(stage.model, "step", breaks)
    monkeypatch.setattr(stage.loop._scheduler, "choose", list)
    asked = (stage.sound(f"s{i}", i, at_once([codes(5, i)])) for i in range(3))
    ended = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), PATIENCE_S)
    assert [type(error) for error in ended] == [SoundEngineStopped] * 3 and len(calls) == 1
    with pytest.raises(SoundEngineStopped, match="the device broke"):
        await stage.task
    with pytest.raises(SoundEngineStopped, match="ended"):
        await stage.sound("late", 0, at_once([codes(5, 0)]))


async def test_it_gets_on_with_each_call_and_has_work_while_jobs_are_there(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, seen = stage.model.step, []

    def watched(numbers: Sequence[int], ending: Sequence[int]) -> StepTime | None:
        seen.append(stage.loop.progress)
        return step(numbers, ending)

    monkeypatch.setattr(stage.model, "step", watched)
    assert stage.loop.progress == Progress(0, has_work=False)
    await stage.sound("a", 0, at_once([codes(30, 0)]))
    assert len({progress.steps for progress in seen}) == len(seen) >= stage.model.steps
    assert all(progress.has_work for progress in seen)
    await stage.until_free()
    assert not stage.loop.progress.has_work


@pytest.mark.parametrize("most", [1, 2, 3])
async def test_no_more_pieces_of_a_stream_are_made_at_once_than_configured_and_sound_as_one_by_one(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    step, begun = stage.model.step, set()

    def watched(numbers: Sequence[int], ending: Sequence[int]) -> StepTime | None:
        begun.add(len(stage.model._pieces))
        return step(numbers, ending)

    async def sound(most: int) -> np.ndarray:
        stage.loop._config = CONFIG.model_copy(update={"max_pieces_at_once": most})
        return await stage.sound("a", 0, at_once([codes(100, 0)]))

    one_by_one = await sound(1)
    monkeypatch.setattr(stage.model, "step", watched)
    np.testing.assert_allclose(await sound(most), one_by_one, atol=1e-5, rtol=0)
    assert len(one_by_one) == 100 * 480 and max(begun) == most


async def test_what_a_round_costs_is_learned_from_streams_and_not_from_whole_answers(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(stage.loop._slack, "began", lambda frames, left_s: told.append(frames))
    unmeasured_s = stage.loop._slack.round_s(1)
    await stage.sound("whole", 0, at_once([codes(60, 0)]), streams=False)
    assert not told and stage.loop._slack.round_s(1) != unmeasured_s  # its pass was measured
    await stage.sound("stream", 0, at_once([codes(40, 0)]))
    assert told == [3 * BLOCK * 2, 16 * 2]  # two blocks and a look-ahead, and the rest


async def test_the_end_of_the_loop_ends_what_runs_and_what_waits(stage: Stage) -> None:
    asked = [asyncio.create_task(stage.sound(f"s{i}", i, at_once([codes(60, i)]))) for i in range(4)]
    while not stage.loop.progress.steps:
        await asyncio.sleep(0)
    stage.task.cancel()
    ended = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), PATIENCE_S)
    assert [type(error) for error in ended] == [SoundEngineStopped] * 4


async def test_a_job_is_due_when_all_jobs_before_it_are_heard_and_keeps_none_that_is_made() -> None:
    job = SoundJob(np.zeros((2 * BLOCK, 1), np.int16), range(480 * BLOCK), 4 * BLOCK, stream="a", look_ahead=BLOCK)
    first = LoopJob(job, 0.0, lambda: job, 9)
    second = LoopJob(job, 0.0, lambda: job, 9, first)
    third = LoopJob(job, 0.0, lambda: job, 9, second)
    assert [asked.samples_before for asked in (first, second, third)] == [0, 480 * BLOCK, 960 * BLOCK]
    first.make(np.zeros(480 * BLOCK))
    assert third.samples_before == 480 * BLOCK and third.follows and not second.follows
    second.make(np.zeros(480 * BLOCK))
    assert second.before is None and not third.follows and third.samples_before == 0
