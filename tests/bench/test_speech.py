from __future__ import annotations

import io
import wave

import numpy as np

from omni_cluster.bench.speech import RATE_HZ, speech, wav


def test_speech_is_the_same_for_its_seed_and_another_for_each() -> None:
    pieces = [speech(1.5, f"0 {number}").tobytes() for number in range(20)]
    assert pieces == [speech(1.5, f"0 {number}").tobytes() for number in range(20)]
    assert len(set(pieces)) == 20 and {len(piece) for piece in pieces} == {2 * 24_000}


def test_speech_has_loud_syllables_and_pauses_in_the_range_of_a_voice() -> None:
    sound = speech(30.0, "0").astype(np.float64)
    loud = np.sqrt((sound[: 30 * RATE_HZ].reshape(-1, RATE_HZ // 50) ** 2).mean(axis=1))
    assert (loud < 30).mean() > 0.05 and (loud > 1000).mean() > 0.4
    assert (np.abs(sound) == 32767).mean() < 0.001
    power = np.abs(np.fft.rfft(sound)) ** 2
    hertz = np.fft.rfftfreq(len(sound), 1 / RATE_HZ)
    assert power[(hertz > 60) & (hertz < 1200)].sum() > 0.8 * power.sum()


def test_a_prompt_longer_than_the_recording_has_its_length() -> None:
    assert len(speech(61.0, "0")) == 61 * RATE_HZ


def test_a_wav_file_is_read_by_others() -> None:
    samples = speech(0.5, "0")
    with wave.open(io.BytesIO(wav(samples))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, RATE_HZ)
        assert file.readframes(file.getnframes()) == samples.tobytes()
