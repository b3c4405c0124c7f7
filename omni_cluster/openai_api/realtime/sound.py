"""Sound on the wire: PCM of 16 bits at 24 kHz, or G.711 at 8 kHz; the model hears float32 at 16 kHz."""

from __future__ import annotations

import base64
import binascii
from typing import Final

import numpy as np
import numpy.typing as npt
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler

from omni_cluster.openai_api.audio import S16_STEP, pcm16
from omni_cluster.openai_api.errors import BadRequest, invalid, lasts_too_long
from omni_cluster.openai_api.media import check_length
from omni_cluster.openai_api.realtime.session import ALaw, Format, MuLaw, Pcm

HEARD_HZ: Final = 16_000
_BIAS: Final = 33


def _mu_law_values() -> npt.NDArray[np.int16]:
    """Of each byte, 16 bits. ITU-T G.711, table 2: magnitude (2 m + 33) 2^s - 33, of 14 bits."""
    byte = ~np.arange(256, dtype=np.int32) & 0xFF
    magnitude = ((2 * (byte & 15) + _BIAS) << (byte >> 4 & 7)) - _BIAS
    return (4 * np.where(byte & 0x80, -magnitude, magnitude)).astype(np.int16)


def _a_law_values() -> npt.NDArray[np.int16]:
    """Of each byte, 16 bits. ITU-T G.711, table 1: magnitude 2 m + 1; after segment 0 (2 m + 33) 2^(s - 1)."""
    byte = np.arange(256, dtype=np.int32) ^ 0x55
    segment, mantissa = byte >> 4 & 7, byte & 15
    magnitude = np.where(segment > 0, (2 * mantissa + _BIAS) << np.maximum(segment - 1, 0), 2 * mantissa + 1)
    return (8 * np.where(byte & 0x80, magnitude, -magnitude)).astype(np.int16)


VALUES: Final = {"audio/pcmu": _mu_law_values(), "audio/pcma": _a_law_values()}


def _nearest_bytes(values: npt.NDArray[np.int16]) -> npt.NDArray[np.uint8]:
    """Of each value of 16 bits, by its number from -32768 on, the byte whose value is nearest."""
    order = np.argsort(values, kind="stable")
    known = values[order].astype(np.int32)
    at = np.clip(np.searchsorted(known, every := np.arange(-32768, 32768)), 1, len(known) - 1)
    nearer = np.where(every - known[at - 1] <= known[at] - every, at - 1, at)
    return order[nearer].astype(np.uint8)


BYTES: Final = {name: _nearest_bytes(values) for name, values in VALUES.items()}


def s16_of(data: bytes, sound: Format, param: str) -> npt.NDArray[np.int16]:
    """Samples of 16 bits at the format's rate. Raises BadRequest for half a sample."""
    if isinstance(sound, Pcm):
        if len(data) % 2:
            raise invalid(param, f"{param} has {len(data)} bytes, but samples of audio/pcm have two; send whole ones.")
        return np.frombuffer(data, "<i2")
    return VALUES[sound.type][np.frombuffer(data, np.uint8)]


def decoded(audio: str, param: str) -> bytes:
    """Raises BadRequest for what is no base64."""
    try:
        return base64.b64decode(audio, validate=True)
    except (binascii.Error, ValueError):
        raise invalid(param, f"{param} is not valid base64; send the sound's bytes as base64.") from None


def samples_of(audio: str, sound: Format, param: str, max_s: float) -> npt.NDArray[np.float32]:
    """Whole sound as the model hears it, float32 `[samples]`. Raises BadRequest."""
    values = s16_of(decoded(audio, param), sound, param)
    if len(values) > max_s * sound.sample_rate_hz:
        raise lasts_too_long("audio", max_s, param)
    if not len(values):
        raise BadRequest(f"{param} has no sound; send some.", param=param, code="invalid_value")
    hears = Hearing(sound)
    samples = np.concatenate([hears.push(values), hears.flush()])
    check_length(samples, param)
    return samples


class Hearing:
    """Resamples sound that comes in pieces to what the model hears. It holds back about a millisecond."""

    def __init__(self, sound: Format) -> None:
        self._rate_hz = sound.sample_rate_hz
        self._resampler = AudioResampler(format="flt", layout="mono", rate=HEARD_HZ)

    def push(self, values: npt.NDArray[np.int16]) -> npt.NDArray[np.float32]:
        """Samples of 16 bits `[n]`; returns float32 at 16 kHz."""
        if not len(values):
            return np.zeros(0, np.float32)
        frame = AudioFrame.from_ndarray(values[None].astype(np.float32) * S16_STEP, format="flt", layout="mono")
        frame.sample_rate = self._rate_hz
        return _joined(self._resampler.resample(frame))

    def flush(self) -> npt.NDArray[np.float32]:
        """What was held back; nothing is pushed after it."""
        return _joined(self._resampler.resample(None))


class Speaking:
    """Sound of the model, float32 at `rate_hz`, as bytes of the session's output format, piece by piece."""

    def __init__(self, sound: Format, rate_hz: int) -> None:
        self._format = sound
        self._rate_hz = rate_hz
        same = rate_hz == sound.sample_rate_hz
        self._resampler = None if same else AudioResampler(format="flt", layout="mono", rate=sound.sample_rate_hz)

    def push(self, samples: npt.NDArray[np.float32]) -> bytes:
        if self._resampler is None:
            return self._coded(samples)
        frame = AudioFrame.from_ndarray(np.ascontiguousarray(samples[None]), format="flt", layout="mono")
        frame.sample_rate = self._rate_hz
        return self._coded(_joined(self._resampler.resample(frame)))

    def flush(self) -> bytes:
        return b"" if self._resampler is None else self._coded(_joined(self._resampler.resample(None)))

    def _coded(self, samples: npt.NDArray[np.float32]) -> bytes:
        pcm = pcm16(samples)
        if isinstance(self._format, MuLaw | ALaw):
            return BYTES[self._format.type][np.frombuffer(pcm, "<i2").astype(np.int32) + 32768].tobytes()
        return pcm


def _joined(frames: list[AudioFrame]) -> npt.NDArray[np.float32]:
    parts = [frame.to_ndarray()[0] for frame in frames]
    return np.concatenate(parts).astype(np.float32, copy=False) if parts else np.zeros(0, np.float32)
