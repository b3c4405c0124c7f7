"""One request as it was measured, by HTTP and from the engines alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from omni_cluster.api_client import SAMPLE_RATE_HZ


@dataclass(frozen=True, slots=True)
class AudioArrival:
    """A chunk of sound: when it came, seconds since its request was sent, and how many samples at 24 kHz it has."""

    at_s: float
    samples: int


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times of one request, seconds since it was sent.

    `text_s` and `audio` are empty for an answer without them; `total_s` is when the answer, or the error, was whole.
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

    @property
    def audio_s(self) -> float:
        """Seconds of sound."""
        return sum(chunk.samples for chunk in self.audio) / SAMPLE_RATE_HZ


Ask = Callable[[int], Awaitable[RequestRecord]]


class Client(Protocol):
    """What asks a server, or the engines."""

    @property
    def model(self) -> str:
        """The name of the model that is asked."""

    async def ask(self, number: int) -> RequestRecord:
        """Sends request `number` and waits for its end; a request that fails is a record too."""


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
