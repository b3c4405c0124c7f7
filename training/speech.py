"""Sound of the small world's sentences, by espeak-ng: questions in many voices (`saying` has the answers).

Every sound is float32 in -1 to 1, one channel, and the same for the same arguments. Questions have 16 kHz, as the
thinker hears.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import wave
from dataclasses import dataclass
from random import Random
from typing import Final

import numpy as np
import numpy.typing as npt

from training.world import Split

Sound = npt.NDArray[np.float32]

QUESTION_HZ: Final = 16_000
NOISE_DB: Final = 20.0
"""How much louder than the noise a question is."""
ESPEAK_HZ: Final = 22_050
PROGRAM: Final = os.environ.get("ESPEAK_NG", "espeak-ng")
AT_ONE_PITCH: Final = '<prosody range="0">{}</prosody>'
QUIET: Final = 0.01
"""Of the loudest sample; what is below it at the ends is silence."""


class NoEspeak(Exception):
    """The program that speaks is not on this machine."""


@dataclass(frozen=True, slots=True)
class Voice:
    """A way in which espeak-ng speaks. `pitch`: 0 to 99."""

    variant: str
    words_per_minute: int
    pitch: int
    accent: str = "en-us"


_VARIANTS: Final = {
    Split.TRAIN: (
        "m1", "m2", "m4", "m6", "m7", "m8", "f1", "f3", "f4", "f5", "adam", "Alex", "anika", "steph", "Mike", "ed",
    ),
    Split.HELD_OUT: ("m3", "m5", "f2", "edward"),
}  # fmt: skip
_RATES: Final = {Split.TRAIN: range(130, 201, 10), Split.HELD_OUT: range(135, 200, 10)}
_PITCHES: Final = {Split.TRAIN: range(20, 81, 10), Split.HELD_OUT: range(25, 80, 10)}
"""No rate, pitch or variant of the one is of the other."""


def question_voice(rng: Random, split: Split) -> Voice:
    return Voice(rng.choice(_VARIANTS[split]), rng.choice(_RATES[split]), rng.choice(_PITCHES[split]))


def question_sound(text: str, voice: Voice, rng: Random) -> Sound:
    """As a microphone has it: of any loudness, noisy, with silence before and after it."""
    said = scaled(speak(text, voice, QUESTION_HZ), rng.uniform(0.03, 0.15))
    sound = padded(said, rng.uniform(0.1, 0.5), rng.uniform(0.2, 0.6), QUESTION_HZ)
    return with_noise(sound, rms(said) * 10 ** (-NOISE_DB / 20), seed=rng.getrandbits(32))


def speak(text: str, voice: Voice, rate_hz: int, *, at_one_pitch: bool = False) -> Sound:
    """Without silence at the ends. Raises NoEspeak."""
    words = as_said(text)
    return trimmed(resampled(_spoken(AT_ONE_PITCH.format(words) if at_one_pitch else words, voice), ESPEAK_HZ, rate_hz))


def _spoken(markup: str, voice: Voice) -> Sound:
    """`markup`: words, or SSML."""
    if shutil.which(PROGRAM) is None:
        raise NoEspeak(f"{PROGRAM} is not installed; install the Debian package espeak-ng.")
    manner = ["-v", f"{voice.accent}+{voice.variant}", "-s", str(voice.words_per_minute), "-p", str(voice.pitch)]
    said = subprocess.run([PROGRAM, "-m", *manner, "--stdout", markup], capture_output=True, check=True)
    with wave.open(io.BytesIO(said.stdout)) as file:
        return np.frombuffer(file.readframes(-1), np.int16).astype(np.float32) / np.float32(2**15)


def as_said(text: str) -> str:
    """A letter that is spelled has its name: espeak-ng would read an "a" between others as the article."""
    parts = text.split()
    if len(parts) > 1 and all(len(part) == 1 for part in parts):
        parts = ["eigh" if part == "a" else part for part in parts]
    return " ".join(parts)


# ------------------------------------------------------------------ arithmetic of sounds


def resampled(sound: Sound, from_hz: int, to_hz: int) -> Sound:
    """By a Fourier transform, for sounds that begin and end in silence."""
    step = from_hz // np.gcd(from_hz, to_hz)
    sound = np.pad(sound, (0, -len(sound) % step))
    length = len(sound) * to_hz // from_hz
    spectrum = np.fft.rfft(sound)[: length // 2 + 1]
    return (np.fft.irfft(spectrum, length) * (length / len(sound))).astype(np.float32)


def trimmed(sound: Sound) -> Sound:
    loud = np.flatnonzero(np.abs(sound) > QUIET * np.abs(sound).max(initial=0))
    return sound[loud[0] : loud[-1] + 1] if len(loud) else sound[:0]


def padded(sound: Sound, before_s: float, after_s: float, rate_hz: int) -> Sound:
    return np.pad(sound, (round(before_s * rate_hz), round(after_s * rate_hz)))


def scaled(sound: Sound, loudness: float) -> Sound:
    """To that root mean square; less where it would clip."""
    if not sound.any():
        return sound
    return sound * np.float32(min(loudness / rms(sound), 0.99 / np.abs(sound).max()))


def with_noise(sound: Sound, loudness: float, seed: int) -> Sound:
    noise = np.random.default_rng(seed).standard_normal(len(sound)).astype(np.float32)
    return (sound + noise * np.float32(loudness)).clip(-1, 1)


def rms(sound: Sound) -> float:
    return float(np.sqrt(np.mean(sound**2)))
