"""The mel frames are BigVGAN's: transformers' own spectrogram of the same frames."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from tests.training.sayings import chord
from training.mel import BINS, HOP, LEAST, SILENT, WINDOW, log_mel
from training.saying import ANSWER_HZ


def test_frames_are_those_of_transformers() -> None:
    sound = chord(10)
    filters = mel_filter_bank(WINDOW // 2 + 1, BINS, 0.0, ANSWER_HZ / 2, ANSWER_HZ, norm="slaney", mel_scale="slaney")
    beside = (WINDOW - HOP) // 2
    wanted = spectrogram(
        np.pad(sound, beside, mode="reflect"), window_function(WINDOW, "hann"), WINDOW, HOP, center=False,
        mel_filters=filters, mel_floor=LEAST, log_mel="log", power=1.0,
    )  # fmt: skip
    made = log_mel(torch.from_numpy(sound)[None])[0]
    assert made.shape == (20, BINS)
    np.testing.assert_allclose(made, wanted.T, atol=0.02)


@pytest.mark.parametrize("frame", [0, 7, 19])
def test_a_frame_is_centred_on_its_own_samples(frame: int) -> None:
    sound = torch.zeros(1, 20 * HOP)
    sound[0, frame * HOP + HOP // 2] = 1
    assert int(log_mel(sound)[0].sum(1).argmax()) == frame


def test_silence_is_the_least_there_is() -> None:
    assert torch.equal(log_mel(torch.zeros(2, 4 * HOP)), torch.full((2, 4, BINS), SILENT))
