"""How high a voice is, by autocorrelation."""

from __future__ import annotations

from typing import Final

import numpy as np

from training.speech import Sound

LOWEST_HZ, HIGHEST_HZ = 60, 400
WINDOWS_A_SECOND: Final = 14
VOICED: Final = 0.5
"""Of a window's loudness, what is alike a period later: less is noise, or no vowel."""
QUIET: Final = 0.02
"""Of a window's energy, as windows are weighted here."""


def pitch_hz(sound: Sound, rate_hz: int) -> float | None:
    """The median of all windows with a voice in them; None where there is none."""
    size = rate_hz // WINDOWS_A_SECOND
    found = [_of_window(sound[start : start + size], rate_hz) for start in range(0, len(sound) - size, size)]
    voiced = [hz for hz in found if hz is not None]
    return float(np.median(voiced)) if voiced else None


def _of_window(window: Sound, rate_hz: int) -> float | None:
    weighted = window * np.hanning(len(window))
    likeness = np.correlate(weighted, weighted, "full")[len(window) - 1 :]
    shortest, longest = rate_hz // HIGHEST_HZ, rate_hz // LOWEST_HZ
    alike = likeness[shortest:longest]
    if likeness[0] < QUIET or alike.max() < VOICED * likeness[0]:
        return None
    return float(rate_hz / (shortest + alike.argmax()))
