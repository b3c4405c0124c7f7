"""Waveforms as clients get them: PCM16, WAV, and pieces of PCM whose base64 can be concatenated."""

from __future__ import annotations

import io
import wave
from typing import Final

import numpy as np
import numpy.typing as npt

S16_STEP: Final = np.float32(1 / 32768)
"""Of samples of 16 bits, whose full scale is 1."""


def pcm16(samples: npt.NDArray[np.float32]) -> bytes:
    """Mono samples `[n]` in [-1, 1] as 16-bit little-endian PCM: x * 32768 rounded, clipped; NaN becomes silence.

    The inverse of reading 16-bit PCM as s / 32768.
    """
    bounded = np.clip(np.nan_to_num(samples, nan=0.0), -1.0, 1.0)
    values: npt.NDArray[np.int16] = np.clip(np.rint(bounded * 32768.0), -32768, 32767).astype("<i2")
    return values.tobytes()


def wav_bytes(samples: npt.NDArray[np.float32], sample_rate: int) -> bytes:
    """A whole mono 16-bit WAV file of samples `[n]` in [-1, 1]; `sample_rate` in Hz."""
    return wav_file(pcm16(samples), sample_rate)


def wav_file(pcm: bytes, sample_rate: int) -> bytes:
    """A whole mono WAV file of 16-bit little-endian PCM."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(sample_rate)
        writer.writeframes(pcm)
    return file.getvalue()


class Base64Pieces:
    """Cuts a PCM16 stream into pieces whose base64 may be concatenated and decoded once.

    Every piece but the last has a multiple of 6 bytes: 3, so that base64 needs no padding, and 2, for whole samples.
    """

    MULTIPLE_BYTES = 6

    def __init__(self) -> None:
        self._rest = b""

    def push(self, pcm: bytes) -> bytes:
        """The bytes that may be sent now; empty when there are too few."""
        held = self._rest + pcm
        cut = len(held) - len(held) % self.MULTIPLE_BYTES
        self._rest = held[cut:]
        return held[:cut]

    def flush(self) -> bytes:
        """The last piece: what is left, under 6 bytes; empty when nothing is."""
        rest, self._rest = self._rest, b""
        return rest
