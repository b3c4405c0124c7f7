"""Sound that is like speech, for spoken prompts: a voice of harmonics and breath, in syllables and pauses."""

from __future__ import annotations

import functools
import random
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

RATE_HZ = 16_000
SYLLABLE_S = 0.2
PAUSES = 0.2
"""Share of the syllables that are silent."""
HARMONICS = 6
PITCH_HZ = 120.0
RECORDING_S = 60.0

Samples = npt.NDArray[np.int16]


def speech(seconds: float, seed: str) -> Samples:
    """A piece of one long recording, from another place for each seed, so that nothing kept answers it."""
    recording = recorded(max(RECORDING_S, 2 * seconds))
    count = round(seconds * RATE_HZ)
    start = random.Random(seed).randrange(len(recording) - count)
    return recording[start : start + count]


@functools.lru_cache(maxsize=2)
def recorded(seconds: float) -> Samples:
    """The recording. The first call takes half a second."""
    draw = np.random.default_rng(0)
    times_s = np.arange(round(seconds * RATE_HZ)) / RATE_HZ
    pitch_hz = PITCH_HZ * (1 + 0.2 * np.sin(2 * np.pi * 0.4 * times_s) + 0.1 * np.sin(2 * np.pi * 1.3 * times_s))
    phase = 2 * np.pi * np.cumsum(pitch_hz) / RATE_HZ
    voice = sum(np.sin(number * phase) / number for number in range(1, HARMONICS + 1))
    sound = voice + 0.2 * draw.standard_normal(len(times_s))
    loud = np.abs(np.sin(np.pi * times_s / SYLLABLE_S)) * _loudness(draw, seconds)[(times_s / SYLLABLE_S).astype(int)]
    return np.clip(8000 * loud * sound, -32768, 32767).astype("<i2")


def _loudness(draw: np.random.Generator, seconds: float) -> npt.NDArray[np.float64]:
    """Of each syllable; 0 in a pause."""
    count = int(seconds / SYLLABLE_S) + 1
    return draw.uniform(0.4, 1.0, count) * (draw.random(count) >= PAUSES)


def wav(samples: Samples) -> bytes:
    """A whole WAV file: its header of 44 bytes, then the samples."""
    data = samples.astype("<i2").tobytes()
    fields: tuple[Any, ...] = (b"WAVE", b"fmt ", 16, 1, 1, RATE_HZ, 2 * RATE_HZ, 2, 16, b"data", len(data))
    return struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(data), *fields) + data
