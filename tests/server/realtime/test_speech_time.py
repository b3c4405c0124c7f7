"""How much of a sound is speech."""

from __future__ import annotations

import numpy as np
import pytest

from omni_cluster.server.realtime.speech_time import SpeechTime

RATE_HZ = 24_000


def tone(seconds: float, decibels: float = -20.0, rate_hz: int = RATE_HZ) -> np.ndarray:
    times = np.arange(round(seconds * rate_hz)) / rate_hz
    return (np.sqrt(2) * 10 ** (decibels / 20) * np.sin(2 * np.pi * 200 * times)).astype(np.float32)


def silent(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE_HZ), np.float32)


def time_of(*parts: np.ndarray) -> SpeechTime:
    time = SpeechTime()
    for part in parts:
        time.add(part, RATE_HZ)
    return time


def test_silence_before_between_and_behind_what_is_said_does_not_count() -> None:
    time = time_of(silent(0.3), tone(0.5), silent(0.4), tone(0.2), silent(1.0))
    assert time.until() == pytest.approx(0.7)
    wanted = {0.0: 0, 0.3: 0, 0.41: 0.11, 0.8: 0.5, 1.2: 0.5, 1.3: 0.6, 1.4: 0.7, 2.4: 0.7, 99: 0.7}
    assert {end_s: round(time.until(end_s), 6) for end_s in wanted} == wanted


@pytest.mark.parametrize(("gap_s", "said_s"), [(0.02, 0.22), (0.14, 0.34), (0.16, 0.2), (0.5, 0.2)])
def test_a_short_silence_is_part_of_a_word(gap_s: float, said_s: float) -> None:
    assert time_of(tone(0.1), silent(gap_s), tone(0.1)).until() == pytest.approx(said_s)


def test_what_is_far_below_the_loudest_is_silence() -> None:
    loud, quiet, noise = tone(0.2, -20), tone(0.2, -48), tone(0.2, -52)
    assert time_of(loud, silent(0.2), quiet, silent(0.2), noise).until() == pytest.approx(0.4)
    assert time_of(noise, silent(0.2)).until() == pytest.approx(0.2)  # nothing is louder so far
    assert time_of(tone(1.0, -75)).until() == 0


@pytest.mark.parametrize("size", [1, 100, 480, 5000])
def test_the_pieces_of_a_sound_make_no_difference(size: int) -> None:
    sound = np.concatenate([silent(0.1), tone(0.333), silent(0.25), tone(0.1)])
    pieces = [sound[start : start + size] for start in range(0, len(sound), size)]
    assert time_of(*pieces).until() == time_of(sound).until() == pytest.approx(0.433, abs=0.021)


def test_other_rates_have_frames_of_the_same_time() -> None:
    time = SpeechTime()
    time.add(tone(0.5, rate_hz=16_000), 16_000)
    assert time.until() == pytest.approx(0.5)


def test_a_sound_that_has_not_begun_has_no_speech() -> None:
    assert SpeechTime().until() == SpeechTime().until(1.0) == 0
