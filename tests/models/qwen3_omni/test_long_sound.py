"""Four minutes of one request: what lower precision adds must not grow with a code's position."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from omni_cluster.models.qwen3_omni.code2wav import PASS_CODES
from omni_cluster.models.qwen3_omni.vocoder import Vocoder, load_vocoder

CODES, PART = 3_000, 250
CPU = torch.device("cpu")
MOST_DISTANCE = 0.06
"""Of bfloat16's spectra from float32's: 0.04 in every part. With the angles of positions in bfloat16 it is 0.07 in the
first one, and 0.36 at the end."""
MOST_GROWTH = 1.1
"""Of a part's distance against the first part's: 1.02 at most."""


def sound(vocoder: Vocoder, codes: np.ndarray) -> torch.Tensor:
    stream = vocoder.stream()
    pieces = [codes[start : start + PASS_CODES] for start in range(0, len(codes), PASS_CODES)]
    return torch.cat([wave for piece in pieces for wave in vocoder.take([stream], [piece])]).float()


def spectra(wave: torch.Tensor) -> torch.Tensor:
    return torch.stft(wave, 1_024, 256, window=torch.hann_window(1_024), return_complex=True).abs()


def distances(wave: torch.Tensor, wanted: torch.Tensor) -> list[float]:
    """Of the spectra of each part."""
    parts = zip(wave.split(1_920 * PART), wanted.split(1_920 * PART), strict=True)
    return [float((spectra(one) - spectra(other)).norm() / spectra(other).norm()) for one, other in parts]


def test_four_minutes_in_bfloat16_are_as_near_to_float32_as_the_first_seconds(qwen3_folder: Path) -> None:
    codes = np.random.RandomState(0).randint(0, 256, (CODES, 4)).astype(np.int16)
    made, wanted = (sound(load_vocoder(qwen3_folder, CPU, each), codes) for each in (torch.bfloat16, torch.float32))
    assert len(made) == len(wanted) == 1_920 * CODES - 555
    found = distances(made, wanted)
    assert len(found) == CODES // PART
    assert max(found) < MOST_DISTANCE and max(found) < MOST_GROWTH * found[0]
