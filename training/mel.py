"""BigVGAN's log-mel spectrogram, 100 frames a second: codes are made of it, the flow makes it, the vocoder reads it."""

from __future__ import annotations

import functools
import math
from typing import Final

import torch
from torch.nn.functional import pad
from transformers.audio_utils import mel_filter_bank

from training.saying import ANSWER_HZ, SAMPLES_A_CODE

BINS: Final = 80
FRAMES_A_CODE: Final = 2
HOP: Final = SAMPLES_A_CODE // FRAMES_A_CODE
"""Samples of a frame."""
WINDOW: Final = 1024
LEAST: Final = 1e-5
"""Amplitude of silence."""
SILENT: Final = math.log(LEAST)


def log_mel(sound: torch.Tensor) -> torch.Tensor:
    """Float32 `[B, samples]` -> `[B, samples / 240, 80]`; a frame is centred on its own 240 samples."""
    beside = (WINDOW - HOP) // 2
    padded = pad(sound[:, None], (beside, beside), mode="reflect")[:, 0]
    spectrum = torch.stft(padded, WINDOW, HOP, WINDOW, hann(WINDOW, sound.device), center=False, return_complex=True)
    magnitude = torch.view_as_real(spectrum).square().sum(-1).add(1e-9).sqrt()
    return (mel_filters(BINS, WINDOW, ANSWER_HZ, sound.device) @ magnitude).clamp(min=LEAST).log().transpose(1, 2)


@functools.cache
@torch.inference_mode(False)  # or a training could not use what was first made outside of it
def hann(window: int, device: torch.device) -> torch.Tensor:
    return torch.hann_window(window, device=device)


@functools.cache
@torch.inference_mode(False)
def mel_filters(bins: int, window: int, rate_hz: int, device: torch.device) -> torch.Tensor:
    """`[bins, window / 2 + 1]`, of one area each."""
    filters = mel_filter_bank(
        num_frequency_bins=window // 2 + 1, num_mel_filters=bins, min_frequency=0.0, max_frequency=rate_hz / 2,
        sampling_rate=rate_hz, norm="slaney", mel_scale="slaney",
    )  # fmt: skip
    return torch.from_numpy(filters).float().T.contiguous().to(device)
