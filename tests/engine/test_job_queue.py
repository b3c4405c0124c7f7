"""Which jobs run together and which first, and when a client runs out of sound."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omni_cluster.config.schema import DiffusionConfig
from omni_cluster.engine.job_queue import JobQueue, PendingJob, Playback
from omni_cluster.models.family import DiffusionJob


def queue(max_batch_size: int = 16, max_batch_frames: int = 16_384) -> JobQueue:
    return JobQueue(DiffusionConfig(max_batch_size=max_batch_size, max_batch_frames=max_batch_frames))


def pending(frames: int, due_s: float, stream: str | None = None) -> PendingJob:
    done: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
    job = DiffusionJob((1,), "v", 0, frames, stream)
    return PendingJob(job, due_s, done, lambda: job)


def put(jobs: JobQueue, *frames: int) -> list[PendingJob]:
    """Jobs that are due in the order of their arrival."""
    made = [pending(n, float(i)) for i, n in enumerate(frames)]
    for one in made:
        jobs.put(one)
    return made


def batches(jobs: JobQueue) -> list[list[int]]:
    taken = []
    while batch := jobs.take_batch():
        taken.append([one.job.frames for one in batch])
    return taken


async def test_no_jobs_no_batch() -> None:
    assert queue().take_batch() == []


async def test_jobs_of_any_lengths_run_together() -> None:
    jobs = queue()
    put(jobs, 100, 1000, 1, 900)
    assert batches(jobs) == [[100, 1000, 1, 900]]


async def test_what_is_due_first_runs_first_whenever_it_came() -> None:
    jobs = queue(max_batch_size=1)
    for frames, due_s in ((10, 3.0), (20, 1.0), (30, 2.0)):
        jobs.put(pending(frames, due_s))
    assert batches(jobs) == [[20], [30], [10]]


async def test_of_jobs_that_are_due_together_the_oldest_runs_first() -> None:
    jobs = queue(max_batch_size=2)
    for frames in (10, 20, 30):
        jobs.put(pending(frames, 1.0))
    assert batches(jobs) == [[10, 20], [30]]


async def test_a_job_that_comes_later_and_is_due_earlier_overtakes_those_that_were_left() -> None:
    jobs = queue(max_batch_size=1)
    jobs.put(pending(10, 2.0))
    jobs.put(pending(20, 3.0))
    assert [one.job.frames for one in jobs.take_batch()] == [10]
    jobs.put(pending(30, 1.0))
    assert batches(jobs) == [[30], [20]]


async def test_whole_answers_and_pieces_of_streams_share_a_batch() -> None:
    jobs = queue()
    jobs.put(pending(10, 1.0, stream="a"))
    jobs.put(pending(20, 2.0))
    jobs.put(pending(30, 3.0, stream="b"))
    assert batches(jobs) == [[10, 20, 30]]


async def test_batch_has_at_most_max_batch_size_jobs() -> None:
    jobs = queue(max_batch_size=3)
    put(jobs, *[10] * 7)
    assert [len(batch) for batch in batches(jobs)] == [3, 3, 1]


async def test_frames_of_a_batch_reach_their_bound_exactly() -> None:
    jobs = queue(max_batch_frames=300)
    put(jobs, 50, 150, 100, 100)
    assert batches(jobs) == [[50, 150, 100], [100]]


async def test_one_frame_above_the_bound_is_left_for_the_next_batch() -> None:
    jobs = queue(max_batch_frames=299)
    put(jobs, 100, 100, 100)
    assert batches(jobs) == [[100, 100], [100]]


async def test_a_job_above_the_bound_runs_alone() -> None:
    jobs = queue(max_batch_frames=50)
    put(jobs, 100, 10, 10)
    assert batches(jobs) == [[100], [10, 10]]


async def test_a_job_counts_and_runs_as_it_is_when_its_batch_begins() -> None:
    jobs = queue(max_batch_frames=100)
    first, second = put(jobs, 50, 50)
    grown = DiffusionJob((1, 2), "v", 0, 60)
    second.latest = lambda: grown
    assert jobs.take_batch() == [first]
    assert [one.job for one in jobs.take_batch()] == [grown]


async def test_none_overtakes_a_job_that_does_not_fit() -> None:
    jobs = queue(max_batch_frames=100)
    put(jobs, 60, 50, 10)
    assert batches(jobs) == [[60], [50, 10]]


async def test_cancelled_jobs_are_dropped_and_not_counted() -> None:
    jobs = queue(max_batch_size=2)
    made = put(jobs, 10, 11, 12)
    made[0].done.cancel()
    assert len(jobs) == 2
    assert batches(jobs) == [[11, 12]]


async def test_drain_gives_all_that_waited() -> None:
    jobs = queue()
    made = put(jobs, 10, 1000, 20)
    made[2].done.cancel()
    assert jobs.drain() == made[:2]
    assert len(jobs) == 0 and jobs.take_batch() == []


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(0, 5)), max_size=30), st.integers(1, 8), st.integers(1, 1000)
)
async def test_batches_hold_each_job_once_in_order_and_within_the_bounds(
    asked: list[tuple[int, int]], max_batch_size: int, max_batch_frames: int
) -> None:
    jobs = queue(max_batch_size, max_batch_frames)
    made = [pending(frames, float(due_s)) for frames, due_s in asked]
    for one in made:
        jobs.put(one)
    taken = list(iter(jobs.take_batch, []))
    assert list(itertools.chain(*taken)) == sorted(made, key=lambda one: one.due_s)
    for batch in taken:
        assert len(batch) <= max_batch_size
        assert len(batch) == 1 or sum(one.job.frames for one in batch) <= max_batch_frames


def test_first_sound_is_due_at_once() -> None:
    assert Playback().due_s(now_s=7.0) == 7.0


def test_later_sound_is_due_when_the_player_has_played_what_it_got() -> None:
    playback = Playback()
    playback.deliver(0.25, now_s=10.0)
    assert playback.due_s(now_s=10.0) == 10.25
    playback.deliver(0.5, now_s=10.5)
    assert playback.due_s(now_s=10.5) == 10.75
