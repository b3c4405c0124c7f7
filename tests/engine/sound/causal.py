"""A small causal sound model of one step and two codebooks, whose first piece is shorter, and jobs of a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass

import numpy as np

from omni_cluster.config.sound_options import SoundOptions
from omni_cluster.models.sound import LinearCost, SoundJob, SoundPriors, StepTime
from omni_cluster.types.outputs import StageChunk

CODEBOOKS, NUM_CODES = 2, 16
SAMPLES_PER_CODE = 8
MISSING = 3
"""Samples that the sound of a request lacks at its beginning: n codes make `SAMPLES_PER_CODE * n - MISSING`."""
DECAY = 0.9
NO_CODES = np.empty((0, CODEBOOKS), np.int16)
SAMPLE_RATE_HZ = 100
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


class CausalOptions(SoundOptions):
    max_batch_codes: int

    @property
    def max_step_size(self) -> int:
        return self.max_batch_codes


@dataclass(slots=True)
class Stream:
    """What a stream keeps between its pieces: its last sample, and how many samples are to be left out still."""

    last: float = 0.0
    missing: int = MISSING


class CausalModel:
    """A `SoundModel`: a leaky sum of what each code adds. Its jobs have neither voice nor seed."""

    steps = 1
    overlaps = False

    def __init__(self) -> None:
        self._tables = np.random.RandomState(0).uniform(-0.02, 0.02, (CODEBOOKS, NUM_CODES, SAMPLES_PER_CODE))
        self._jobs: dict[int, SoundJob] = {}
        self._waves: dict[int, list[np.ndarray]] = {}
        self._states: dict[int, Stream] = {}
        self.streams: dict[str, Stream] = {}
        self.batches: list[int] = []
        """Jobs of each step."""
        self.sizes: list[int] = []
        """Codes of each step."""

    def begin(self, number: int, job: SoundJob) -> None:
        self._jobs[number], self._waves[number] = job, []
        self._states[number] = self._state(job)

    def step(self, numbers: Sequence[int], ending: Sequence[int] = ()) -> StepTime | None:
        parts = [self._next_part(number) for number in numbers]
        for number, part in zip(numbers, parts, strict=True):
            self._waves[number].append(self._wave(self._jobs[number], part, self._states[number]))
        self.batches.append(len(parts))
        self.sizes.append(sum(map(len, parts)))
        return StepTime(self.sizes[-1], 1e-3)

    def _next_part(self, number: int) -> np.ndarray:
        job = self._jobs[number]
        return np.array_split(job.codes, job.parts)[len(self._waves[number])]

    def finish(self, numbers: Sequence[int]) -> list[np.ndarray]:
        waves = [np.concatenate(self._waves[number]) for number in numbers]
        self.drop(numbers)
        return waves

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._jobs.pop(number, None)
            self._waves.pop(number, None)
            self._states.pop(number, None)

    def forget(self, streams: Sequence[str]) -> None:
        for stream in streams:
            self.streams.pop(stream, None)

    def is_empty(self) -> bool:
        return not (self._jobs or self._waves or self._states or self.streams)

    def _state(self, job: SoundJob) -> Stream:
        if job.stream in self.streams:
            return self.streams[job.stream]
        state = Stream()
        if job.context is not None:
            self._sound(job.context, state)
        if job.stream is not None:
            self.streams[job.stream] = state
        return state

    def _wave(self, job: SoundJob, codes: np.ndarray, state: Stream) -> np.ndarray:
        made, missing = self._sound(codes, state), state.missing
        state.missing = 0
        return made[missing:]

    def _sound(self, codes: np.ndarray, state: Stream) -> np.ndarray:
        added = sum(self._tables[book][codes[:, book]] for book in range(CODEBOOKS))
        wave = np.empty(len(codes) * SAMPLES_PER_CODE, np.float32)
        for i, sample in enumerate(np.ravel(added)):
            state.last = wave[i] = np.float32(DECAY * state.last + sample)
        return wave


class CausalSession:
    """A `SoundSession`: whatever codes are there make the next piece, or all of them the only one."""

    def __init__(self, name: str, upstream: AsyncIterator[StageChunk], streams: bool, context: np.ndarray) -> None:
        self._stream = name if streams else None
        self._upstream, self._context = upstream, context
        self._codes = NO_CODES
        self._start = self._end = 0
        self.parts = 1
        """Of a whole request."""

    async def jobs(self) -> AsyncGenerator[SoundJob, None]:
        async for chunk in self._upstream:
            new = None if chunk.codes is None else chunk.codes.after(len(self._codes))
            self._codes = self._codes if new is None else np.concatenate([self._codes, new.values])
            if self._stream is not None and self._start < len(self._codes):
                yield self.latest()
                self._start = self._end
                await asyncio.sleep(0)
        if self._start < len(self._codes):
            yield self.latest()

    def latest(self) -> SoundJob:
        self._end = len(self._codes)
        return SoundJob(
            self._codes[self._start :],
            range(samples_of(self._start), samples_of(self._end)),
            size=-(-(self._end - self._start) // self.parts),
            context=self._context,
            stream=self._stream,
            parts=1 if self._stream is not None else self.parts,
        )


def samples_of(codes: int) -> int:
    """Samples of a request's first codes."""
    return max(0, codes * SAMPLES_PER_CODE - MISSING)
