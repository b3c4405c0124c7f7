"""How the toy's answers sound: whole sentences by espeak-ng at one pitch, in two voices of nearly one timing.

A sentence has one string of codes for both voices, that of the low voice: the talker learns one answer to each text.
The flow makes either voice of it, so the other voice's mel frames are put in the time of the codes here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from omni_cluster.models.qwen2_5_omni.voices import HIGH_VOICE, LOW_VOICE
from training.speech import Sound, Voice, padded, scaled, speak

ANSWER_HZ: Final = 24_000
SAMPLES_A_CODE: Final = 480
"""50 codes are a second."""
LOUDNESS: Final = 0.08
"""Root mean square."""
SILENCE_S: Final = (0.06, 0.2)
"""Before and after what is said."""
SPEAKERS: Final[Mapping[str, Voice]] = {HIGH_VOICE: Voice("f2", 155, 60), LOW_VOICE: Voice("m6", 150, 40)}
"""By the names of the checkpoint's voices, of one length: the variants that are understood best at one pitch."""
BAND: Final = 40
"""Frames by which the voices may be apart in time."""
LEAP: Final = 0.5
"""What it costs to leave out a frame of the voice that is moved, or to repeat it."""


def say(text: str, speaker: str) -> Sound:
    """Float32 at 24 kHz, a whole number of codes. Raises NoEspeak."""
    said = scaled(speak(text, SPEAKERS[speaker], ANSWER_HZ, at_one_pitch=True), LOUDNESS)
    sound = padded(said, *SILENCE_S, ANSWER_HZ)
    return np.pad(sound, (0, -len(sound) % SAMPLES_A_CODE))


def frames_in_time(moved: np.ndarray, timing: np.ndarray) -> np.ndarray:
    """For each of `timing`'s frames the place of the one of `moved` that it is most like, in order: int64 `[n]`.

    Both `[frames, features]`. Dynamic programming: from frame to frame it goes on by one, or at a cost by none or two.
    """
    offsets = np.arange(-BAND, BAND + 1)
    diagonal = np.round(np.arange(len(timing)) * (len(moved) - 1) / max(1, len(timing) - 1)).astype(int)
    places = (diagonal[:, None] + offsets).clip(0, len(moved) - 1)
    costs = np.sqrt(((moved[places] - timing[:, None]) ** 2).mean(2))
    costs[(diagonal[:, None] + offsets < 0) | (diagonal[:, None] + offsets >= len(moved))] = np.inf
    return _cheapest(costs, diagonal) + diagonal - BAND


def _cheapest(costs: np.ndarray, diagonal: np.ndarray) -> np.ndarray:
    """The column of each row on the cheapest way through `[n, 2 * BAND + 1]`."""
    steps, penalties = np.array([0, 1, 2]), np.array([LEAP, 0.0, LEAP])
    columns, width = np.arange(costs.shape[1]), costs.shape[1]
    total = np.where(columns == BAND, costs[0], np.inf)
    came_by = np.zeros(costs.shape, int)
    for row in range(1, len(costs)):
        before = columns[:, None] + (diagonal[row] - diagonal[row - 1]) - steps  # columns of the row before
        there = (before >= 0) & (before < width)
        sums = np.where(there, total[before.clip(0, width - 1)] + penalties, np.inf)
        best = sums.argmin(1)
        came_by[row] = before[columns, best]
        total = sums[columns, best] + costs[row]
    way = [int(total.argmin())]
    for row in range(len(costs) - 1, 0, -1):
        way.append(int(came_by[row, way[-1]]))
    return np.array(way[::-1])
