"""What espeak-ng says of the small world: as long, as loud, as noisy and as high as is asked."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from omni_cluster.models.qwen2_5_omni.voices import HIGH_VOICE, LOW_VOICE
from training import speech
from training.pitch import pitch_hz
from training.saying import ANSWER_HZ, LOUDNESS, SAMPLES_A_CODE, SILENCE_S, SPEAKERS, say
from training.speech import QUESTION_HZ, NoEspeak, Sound, rms
from training.world import Split

SENTENCE = "the green bird sings near the river"


def tone(rate_hz: int, hz: float = 440) -> Sound:
    times = np.arange(rate_hz) / rate_hz
    return (np.sin(2 * np.pi * hz * times) * np.hanning(rate_hz)).astype(np.float32)


def test_a_tone_keeps_its_pitch_at_another_rate() -> None:
    for to_hz in (QUESTION_HZ, ANSWER_HZ):
        assert np.abs(speech.resampled(tone(22_050), 22_050, to_hz) - tone(to_hz)).max() < 1e-3


def test_silence_is_cut_from_the_ends_and_put_there() -> None:
    sound = speech.padded(np.ones(100, np.float32), 0.01, 0.02, 1000)
    assert (len(sound), len(speech.trimmed(sound))) == (130, 100)
    assert len(speech.trimmed(np.zeros(100, np.float32))) == 0


def test_a_scaled_sound_does_not_clip() -> None:
    assert rms(speech.scaled(tone(8000), 0.1)) == pytest.approx(0.1, rel=1e-3)
    assert np.abs(speech.scaled(tone(8000), 5.0)).max() == pytest.approx(0.99)
    assert not speech.scaled(np.zeros(10, np.float32), 0.1).any()


def test_a_spelled_a_has_its_name() -> None:
    assert speech.as_said("c a t") == "c eigh t"
    assert speech.as_said("i see a red star") == "i see a red star"


def test_no_variant_rate_or_pitch_is_of_both_splits() -> None:
    trained, others = (
        [speech.question_voice(Random(seed), split) for seed in range(500)] for split in (Split.TRAIN, Split.HELD_OUT)
    )
    for part in ("variant", "words_per_minute", "pitch"):
        known, unknown = ({getattr(voice, part) for voice in voices} for voices in (trained, others))
        assert len(unknown) > 3 and not known & unknown
    assert all(130 <= voice.words_per_minute <= 200 for voice in trained + others)


def test_without_the_program_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "PROGRAM", "/no/espeak-ng")
    with pytest.raises(NoEspeak, match=r"^/no/espeak-ng is not installed; install the Debian package espeak-ng\.$"):
        say(SENTENCE, HIGH_VOICE)


@pytest.mark.usefixtures("espeak")
def test_answers_are_whole_codes_of_one_loudness_with_silence_around_them() -> None:
    for speaker in SPEAKERS:
        sound = say(SENTENCE, speaker)
        assert sound.dtype == np.float32 and len(sound) % SAMPLES_A_CODE == 0
        assert 1.5 < len(sound) / ANSWER_HZ < 3.5
        before, after = (round(seconds * ANSWER_HZ) for seconds in SILENCE_S)
        assert not sound[:before].any() and not sound[-after:].any()
        assert rms(speech.trimmed(sound)) == pytest.approx(LOUDNESS, rel=0.02)
        assert (sound == say(SENTENCE, speaker)).all()


@pytest.mark.usefixtures("espeak")
def test_a_listener_tells_the_two_voices_apart_by_their_pitch() -> None:
    high, low = (pitch_hz(say(SENTENCE, speaker), ANSWER_HZ) for speaker in (HIGH_VOICE, LOW_VOICE))
    assert 160 < high < 300 and 70 < low < 130


@pytest.mark.usefixtures("espeak")
def test_a_question_is_20_db_louder_than_its_noise() -> None:
    voice = speech.question_voice(Random(1), Split.TRAIN)
    sound = speech.question_sound(SENTENCE, voice, Random(2))
    assert sound.dtype == np.float32 and 1 < len(sound) / QUESTION_HZ < 5
    noise = rms(sound[: QUESTION_HZ // 12])  # before it begins
    spoken = sound[QUESTION_HZ // 2 : -QUESTION_HZ * 6 // 10]
    assert 20 * np.log10(rms(spoken) / noise) == pytest.approx(20, abs=2)
    assert (sound == speech.question_sound(SENTENCE, voice, Random(2))).all()
