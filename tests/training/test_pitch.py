"""The pitch of a sound is found whatever its harmonics are, and none is found in what has none."""

from __future__ import annotations

import numpy as np
import pytest

from tests.training.sayings import chord
from training.pitch import pitch_hz
from training.saying import ANSWER_HZ


@pytest.mark.parametrize("hz", [80.0, 110.0, 200.0, 320.0])
def test_the_pitch_of_a_chord_is_its_lowest_tone_s(hz: float) -> None:
    assert pitch_hz(chord(100, hz), ANSWER_HZ) == pytest.approx(hz, rel=0.02)


def test_silence_noise_and_what_is_shorter_than_a_window_have_none() -> None:
    noise = np.random.default_rng(0).standard_normal(ANSWER_HZ).astype(np.float32) * 0.1
    for sound in (np.zeros(ANSWER_HZ, np.float32), noise, chord(100)[:100], np.zeros(0, np.float32)):
        assert pitch_hz(sound, ANSWER_HZ) is None
