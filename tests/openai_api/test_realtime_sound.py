"""Sound on the wire of realtime sessions."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.realtime.session import ALaw, MuLaw, Pcm
from omni_cluster.openai_api.realtime.sound import BYTES, HEARD_HZ, VALUES, Hearing, Speaking, s16_of, samples_of

MU, A = "audio/pcmu", "audio/pcma"


@pytest.mark.parametrize(
    ("name", "byte", "value"),
    [
        (MU, 0x80, 32124),
        (MU, 0x00, -32124),
        (MU, 0xFF, 0),
        (MU, 0x7F, 0),
        (A, 0xAA, 32256),
        (A, 0x2A, -32256),
        (A, 0xD5, 8),
    ],
)
def test_bytes_have_the_values_of_g711(name: str, byte: int, value: int) -> None:
    assert VALUES[name][byte] == value


@pytest.mark.parametrize("name", [MU, A])
def test_each_value_gets_the_nearest_byte(name: str) -> None:
    every = np.arange(-32768, 32768)
    nearest = np.abs(VALUES[name].astype(np.int64)[None] - every[::37, None]).min(1)
    assert np.array_equal(np.abs(VALUES[name][BYTES[name]].astype(np.int64) - every)[::37], nearest)


def test_pieces_are_heard_as_the_whole() -> None:
    values = np.random.default_rng(0).integers(-9_000, 9_000, 24_000).astype("<i2")
    whole = samples_of(base64.b64encode(values.tobytes()).decode(), Pcm(), "audio", 10)
    hears = Hearing(Pcm())
    pieces = [hears.push(values[start : start + 481]) for start in range(0, len(values), 481)]
    assert np.array_equal(np.concatenate([*pieces, hears.flush()]), whole)
    assert len(whole) == HEARD_HZ


@pytest.mark.parametrize("sound", [Pcm(), MuLaw(type=MU), ALaw(type=A)])
def test_a_tone_stays_that_tone(sound: Pcm | MuLaw | ALaw) -> None:
    tone = (0.5 * np.sin(2 * np.pi * 440 * np.arange(24_000) / 24_000)).astype(np.float32)
    speaks = Speaking(sound, 24_000)
    data = b"".join([*(speaks.push(tone[start : start + 5760]) for start in range(0, 24_000, 5760)), speaks.flush()])
    values = s16_of(data, sound, "audio")
    assert len(values) == sound.sample_rate_hz
    spectrum = np.abs(np.fft.rfft(values))
    assert spectrum.argmax() == 440 and spectrum[440] ** 2 > 0.99 * (spectrum**2).sum()


def test_too_long_and_empty_sound_is_refused() -> None:
    second = base64.b64encode(bytes(48_000)).decode()
    assert len(samples_of(second, Pcm(), "audio", 1)) == HEARD_HZ
    with pytest.raises(BadRequest, match=r"lasts longer than 0\.5 s"):
        samples_of(second, Pcm(), "audio", 0.5)
    with pytest.raises(BadRequest, match="has no sound"):
        samples_of("", Pcm(), "audio", 1)
