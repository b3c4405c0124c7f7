from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from omni_cluster.openai_api.audio import Base64Pieces, pcm16, wav_bytes


def test_all_16_bit_values_come_back_exactly() -> None:
    values = np.arange(-32768, 32768, dtype=np.int16)
    samples = values.astype(np.float32) / np.float32(32768)
    assert pcm16(samples) == values.astype("<i2").tobytes()


@pytest.mark.parametrize(
    ("sample", "value"),
    [
        (0.0, 0),
        (1.0, 32767),
        (-1.0, -32768),
        (7.5, 32767),
        (-7.5, -32768),
        (0.6 / 32768, 1),
        (0.4 / 32768, 0),
        (float("nan"), 0),
        (float("inf"), 32767),
        (float("-inf"), -32768),
    ],
)
def test_samples_are_rounded_and_clipped(sample: float, value: int) -> None:
    assert np.frombuffer(pcm16(np.array([sample], np.float32)), "<i2").tolist() == [value]


@pytest.mark.parametrize("count", [0, 1, 999])
def test_a_wav_is_read_by_soundfile(count: int) -> None:
    samples = np.random.default_rng(0).uniform(-1, 1, count).astype(np.float32)
    read, rate = soundfile.read(io.BytesIO(wav_bytes(samples, 24_000)), dtype="int16")
    assert rate == 24_000
    assert read.tobytes() == pcm16(samples)


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_concatenated_base64_decodes_once_to_the_whole(pushed: list[bytes]) -> None:
    cutter = Base64Pieces()
    pieces = [cutter.push(pcm) for pcm in pushed] + [cutter.flush()]
    assert all(len(piece) % 6 == 0 for piece in pieces[:-1])
    text = b"".join(base64.b64encode(piece) for piece in pieces)
    assert base64.b64decode(text, validate=True) == b"".join(pushed)


def test_nothing_is_held_back_but_the_last_bytes() -> None:
    cutter = Base64Pieces()
    assert cutter.push(b"12345") == b""
    assert cutter.push(b"67890abc") == b"1234567890ab"
    assert cutter.flush() == b"c"
    assert cutter.flush() == b""
