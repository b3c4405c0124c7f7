"""One request as it was measured, by HTTP and from the engines alike."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from omni_cluster.bench.load import Load

AUDIBLE = 0.01
"""Of full scale, -40 dB: from here on a sample is heard."""


@dataclass(frozen=True, slots=True)
class AudioArrival:
    """A chunk of sound: when it came, seconds since its request was sent, and how many samples it has."""

    at_s: float
    samples: int


@dataclass(slots=True)
class Sound:
    """The sound of one answer as it comes. `audible_at`: its first sample that is heard; None while there is none."""

    arrivals: list[AudioArrival] = field(default_factory=list)
    audible_at: int | None = None
    samples: int = 0

    def add(self, piece: npt.NDArray[np.float32], now_s: float) -> None:
        """Takes samples in [-1, 1]."""
        if self.audible_at is None:
            heard = np.flatnonzero(np.abs(piece) >= AUDIBLE)
            self.audible_at = self.samples + int(heard[0]) if heard.size else None
        self.samples += len(piece)
        self.arrivals.append(AudioArrival(now_s, len(piece)))


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times of one request, seconds since it was sent.

    `text_s` and `audio` are empty for an answer without them; `total_s` is when the answer, or the error, was whole.
    `audible_at` is the sample of the sound from which on it is heard, None where nothing is.
    `earlier_turns` of its conversation are in its prompt; `reply` is the answer's text.
    `stages` holds for each stage what the server says of it, under names that end in `_s`, seconds since the request
    entered the pipeline. `error` is the sentence that the request ended with, None for one that succeeded.
    """

    number: int
    total_s: float
    text_s: tuple[float, ...] = ()
    audio: tuple[AudioArrival, ...] = ()
    stages: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    prompt_tokens: int = 0
    text_tokens: int = 0
    codec_tokens: int = 0
    error: str | None = None
    audible_at: int | None = None
    earlier_turns: int = 0
    reply: str = ""
    sample_rate_hz: int = field(kw_only=True)

    @property
    def audio_s(self) -> float:
        """Seconds of sound."""
        return sum(chunk.samples for chunk in self.audio) / self.sample_rate_hz if self.audio else 0.0


@dataclass(frozen=True, slots=True)
class Said:
    """A turn of a conversation: the number of its request, by which the load knows the message, and the reply."""

    number: int
    reply: str


class Ask(Protocol):
    """See `Client.ask`."""

    async def __call__(self, number: int, said: Sequence[Said] = ()) -> RequestRecord: ...


class Client(Protocol):
    """What asks a server, or the engines."""

    @property
    def model(self) -> str:
        """The name of the model that is asked."""

    @property
    def load(self) -> Load:
        """What it is asked, in the model's own codes."""

    async def ask(self, number: int, said: Sequence[Said] = ()) -> RequestRecord:
        """Sends request `number`, behind what was `said` before it, and waits for its end.

        A request that fails is a record too.
        """


def stage_seconds(times: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """All times of each stage, whatever they are called, and how long it was at work as `work_s`."""
    return {name: _seconds(stage) for name, stage in times.items()}


def _seconds(stage: Mapping[str, float]) -> dict[str, float]:
    seconds = {key: float(value) for key, value in stage.items() if key.endswith("_s") and value is not None}
    if "first_s" in seconds and "last_s" in seconds:
        seconds["work_s"] = seconds["last_s"] - seconds["first_s"]
    return seconds


@dataclass(slots=True)
class Stopwatch:
    """Seconds since a request was sent."""

    started_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() - self.started_s
