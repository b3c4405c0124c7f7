"""Codes tell what is said: the nearest sounds of a codebook with few switches, in one time for both voices."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from omni_cluster.models.qwen2_5_omni.voices import HIGH_VOICE, LOW_VOICE
from training import saying, speech
from training.codes import CEPSTRA, NO_CODE, SILENCE, SWITCH, Codebook, _cosines, nearest_means, shapes
from training.mel import BINS, FRAMES_A_CODE, HOP, log_mel
from training.saying import frames_in_time, say
from training.wave_data import Sayings, made, texts
from training.world import Split


def book(size: int = 6, apart: float = 10.0) -> Codebook:
    centres = apart * torch.randn(size, CEPSTRA, generator=torch.Generator().manual_seed(1))
    centres[NO_CODE] = torch.inf
    return Codebook(centres)


def mel_of(codebook: Codebook, codes: list[int]) -> torch.Tensor:
    """The smooth spectra that codes stand for: `[2 n, 80]`."""
    return (codebook.centres[codes] @ _cosines()).repeat_interleave(FRAMES_A_CODE, 0)


def test_codes_of_what_codes_stand_for_are_the_same() -> None:
    string = [1, 1, 3, 5, 5, 2, 4, 1]
    mel = mel_of(book(), string)
    assert mel.shape == (len(string) * FRAMES_A_CODE, BINS)
    assert book().codes(mel) == string


def test_a_string_has_the_least_cost_of_all() -> None:
    near, noise = book(4, apart=0.3), torch.randn(12, BINS, generator=torch.Generator().manual_seed(2))
    mel = mel_of(near, [1, 1, 2, 3, 3, 1]) + 0.3 * noise
    distances = torch.cdist(shapes(mel), near.centres).square()

    def cost(string: tuple[int, ...]) -> float:
        switches = sum(a != b for a, b in itertools.pairwise(string))
        return float(distances[range(len(string)), string].sum()) + SWITCH * switches

    found = near.codes(mel)
    assert found != distances.argmin(1).tolist() and len(set(found)) > 1
    assert tuple(found) == min(itertools.product((1, 2, 3), repeat=6), key=cost)


def test_silence_has_a_code_of_its_own_and_one_code_is_no_sounds() -> None:
    noise = torch.randn(1, 50 * HOP * FRAMES_A_CODE, generator=torch.Generator().manual_seed(0))
    fitted = Codebook.fitted([log_mel(noise)[0]], size=12)
    assert fitted.codes(log_mel(torch.zeros(1, 8 * HOP))[0]) == [SILENCE] * 4
    found = fitted.codes(log_mel(noise)[0])
    assert NO_CODE not in found and SILENCE not in found and len(set(found)) > 1


def test_means_are_where_the_points_are() -> None:
    places = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    points = (places[:, None] + 0.1 * torch.randn(3, 20, 2, generator=torch.Generator().manual_seed(3))).flatten(0, 1)
    means = nearest_means(points, 3, torch.Generator().manual_seed(0))
    assert float(torch.cdist(places, means).amin(1).max()) < 0.1


def test_the_same_codebook_is_read_again(tmp_path: Path) -> None:
    book().save(tmp_path / "codebook.pt")
    assert torch.equal(Codebook.load(tmp_path / "codebook.pt").centres, book().centres)


# ------------------------------------------------------------------ one time for both voices


def walk(frames: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((frames, CEPSTRA)).cumsum(0)


@pytest.mark.parametrize(
    "places", [np.repeat(np.arange(60), 2)[:90], np.r_[0:10, np.repeat(np.arange(10, 30), 2), 30:60]]
)
def test_a_slower_voice_is_put_in_the_time_of_the_other(places: np.ndarray) -> None:
    timing = walk(places[-1] + 1)
    moved = timing[places]
    assert np.array_equal(moved[frames_in_time(moved, timing)], timing)


def test_frames_go_on_in_order_from_the_first_one_to_near_the_last() -> None:
    found = frames_in_time(walk(80), walk(100)[::-1])
    assert len(found) == 100 and found[0] == 0
    assert set(np.diff(found)) <= {0, 1, 2} and found.min() >= 0 and found.max() < 80


@pytest.mark.usefixtures("espeak")
def test_voices_differ_and_their_frames_do_not_part(tmp_path: Path) -> None:
    said = ["good night", "two plus one is three"]
    sayings, codebook = made(said, book(40), cores=0)
    assert list(sayings.voices) == [HIGH_VOICE, LOW_VOICE]
    for number, codes in enumerate(sayings.codes):
        high, low = (torch.from_numpy(of_voice[number]).float() for of_voice in sayings.mels)
        assert high.shape == low.shape == (FRAMES_A_CODE * len(codes), BINS)
        assert float((high - low).abs().mean()) < float((high - low.roll(10, 0)).abs().mean())
        assert codes.tolist() == codebook.codes_of(said[number])
    sayings.save(tmp_path)
    again = Sayings.load(tmp_path)
    assert again.texts == said and np.array_equal(again.mels[1][1], sayings.mels[1][1])


@pytest.mark.usefixtures("espeak")
@pytest.mark.parametrize("speaker", [HIGH_VOICE, LOW_VOICE])
def test_a_sentence_is_said_at_one_pitch(speaker: str) -> None:
    """The pitch is where the spectrum of the whole sentence is sharp: few frequencies have half of the power."""
    sound = say("the green bird is near the river", speaker)
    assert len(sound) % saying.SAMPLES_A_CODE == 0 and speech.rms(sound) > 0.05
    plain = speech.speak("the green bird is near the river", saying.SPEAKERS[speaker], saying.ANSWER_HZ)

    def sharpness(heard: np.ndarray) -> int:
        power = np.sort(np.abs(np.fft.rfft(heard, 2**17))[: 2**14] ** 2)[::-1].cumsum()
        return int((power < power[-1] / 2).sum())

    assert sharpness(sound) < 0.7 * sharpness(plain)


def test_sentences_to_train_on_differ_and_are_not_held_out() -> None:
    trained = texts(200)
    assert len(set(trained)) == 200 == len(trained)
    held_out = texts(200, Split.HELD_OUT)
    assert len(held_out) == 200 and not {*held_out} & {*texts(1000)}
