from __future__ import annotations

import asyncio

from omni_cluster.config.schema import DiffusionConfig
from omni_cluster.engine.diffusion_engine import MAX_PADDING, JobQueue, PendingJob
from omni_cluster.models.family import DiffusionJob


def queue(max_batch_size: int = 16, max_batch_frames: int = 16_384) -> JobQueue:
    return JobQueue(DiffusionConfig(max_batch_size=max_batch_size, max_batch_frames=max_batch_frames))


def put(jobs: JobQueue, *frames: int) -> list[PendingJob]:
    loop = asyncio.get_running_loop()
    made = [PendingJob(DiffusionJob((1,), "v", i, n), loop.create_future()) for i, n in enumerate(frames)]
    for pending in made:
        jobs.put(pending)
    return made


def batches(jobs: JobQueue) -> list[list[int]]:
    taken = []
    while batch := jobs.take_batch():
        taken.append([pending.job.frames for pending in batch])
    return taken


async def test_no_jobs_no_batch() -> None:
    assert queue().take_batch() == []


async def test_jobs_of_near_lengths_run_together_oldest_first() -> None:
    jobs = queue()
    put(jobs, 100, 1000, 110, 900, 120)
    assert batches(jobs) == [[100, 110, 120], [1000, 900]]


async def test_padding_bound_is_reached_exactly_and_not_exceeded() -> None:
    jobs = queue()
    put(jobs, 100, int(100 * MAX_PADDING), int(100 * MAX_PADDING) + 1)
    assert batches(jobs) == [[100, 125], [126]]


async def test_padding_counts_between_any_two_jobs_of_a_batch() -> None:
    jobs = queue()
    put(jobs, 100, 80, 110)
    assert batches(jobs) == [[100, 80], [110]]


async def test_batch_has_at_most_max_batch_size_jobs() -> None:
    jobs = queue(max_batch_size=3)
    put(jobs, *[10] * 7)
    assert [len(batch) for batch in batches(jobs)] == [3, 3, 1]


async def test_frames_of_a_batch_reach_their_bound_exactly() -> None:
    jobs = queue(max_batch_frames=300)
    put(jobs, 100, 100, 100, 100)
    assert batches(jobs) == [[100, 100, 100], [100]]


async def test_one_frame_above_the_bound_is_left_for_the_next_batch() -> None:
    jobs = queue(max_batch_frames=299)
    put(jobs, 100, 100, 100)
    assert batches(jobs) == [[100, 100], [100]]


async def test_padded_frames_count_toward_the_bound() -> None:
    jobs = queue(max_batch_frames=300)
    put(jobs, 100, 100, 101)  # 3 * 101 would be computed
    assert batches(jobs) == [[100, 100], [101]]


async def test_a_job_above_the_bound_runs_alone() -> None:
    jobs = queue(max_batch_frames=50)
    put(jobs, 100, 10)
    assert batches(jobs) == [[100], [10]]


async def test_the_oldest_is_never_left_behind() -> None:
    jobs = queue(max_batch_size=2)
    put(jobs, 1000, 10, 10)
    put(jobs, 1000)
    assert batches(jobs) == [[1000, 1000], [10, 10]]


async def test_cancelled_jobs_are_dropped() -> None:
    jobs = queue(max_batch_size=2)
    made = put(jobs, 10, 11, 12)
    made[0].done.cancel()
    assert batches(jobs) == [[11, 12]]


async def test_drain_gives_all_that_waited() -> None:
    jobs = queue()
    made = put(jobs, 10, 1000)
    assert len(jobs) == 2
    assert jobs.drain() == made
    assert len(jobs) == 0 and jobs.take_batch() == []
