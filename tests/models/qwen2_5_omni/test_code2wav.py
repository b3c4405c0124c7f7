from __future__ import annotations

from omni_cluster.inputs import OmniRequest
from omni_cluster.models.family import DiffusionJob
from omni_cluster.models.qwen2_5_omni.code2wav import Code2WavSession
from omni_cluster.models.qwen2_5_omni.special_ids import SpecialIds
from omni_cluster.outputs import StageChunk
from tests.engine.stages import at_once

IDS = SpecialIds(codec_pad=92, codec_bos=93, codec_eos=94, codec_mask=96, text_pad=1, text_eos=2, num_codes=80)


async def jobs(*chunks: StageChunk, seed: int = 3) -> list[DiffusionJob]:
    session = Code2WavSession(OmniRequest("r", "", seed=seed), at_once(list(chunks)), IDS, 2, "Ethan")
    return [job async for job in session.jobs()]


async def test_all_codes_are_one_job_in_the_requests_voice_and_seed() -> None:
    made = await jobs(StageChunk(0, (5, 6)), StageChunk(2, (7,)), StageChunk(3, finish_reason="length"))
    assert made == [DiffusionJob((5, 6, 7), "Ethan", 3, frames=6)]


async def test_stop_codes_are_no_sound() -> None:
    assert [job.codes for job in await jobs(StageChunk(0, (5, 6, 94), finish_reason="stop"))] == [(5, 6)]
    assert [job.codes for job in await jobs(StageChunk(0, (5, 92), finish_reason="stop"))] == [(5,)]


async def test_codes_that_come_twice_are_dropped() -> None:
    made = await jobs(StageChunk(0, (5, 6)), StageChunk(0, (5, 6)), StageChunk(1, (6, 7, 8)), StageChunk(4, (9,)))
    assert [job.codes for job in made] == [(5, 6, 7, 8, 9)]


async def test_without_codes_there_is_no_job() -> None:
    assert await jobs() == []
    assert await jobs(StageChunk(finish_reason="stop")) == []
    assert await jobs(StageChunk(0, (94,), finish_reason="stop")) == []
