"""How much of a sound is speech: all of it but its pauses."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

FRAMES_A_S: Final = 50
PAUSE: Final = 8
"""Silent frames in a row that are a pause; within a word there are fewer, before its "t" or "k"."""
BELOW_DB: Final = 30
"""By which silence is below the loudest frame."""
FULL_DB: Final = 100
"""Of a sound as loud as can be. A frame's loudness is a whole number from 0 on, so that it is a byte."""
SILENCE_DB: Final = 30
"""What is not louder is silence, whatever else was heard."""


class SpeechTime:
    """Of one sound that comes in pieces. It keeps 50 bytes a second."""

    def __init__(self) -> None:
        self._loudness = bytearray()
        self._rest = np.zeros(0, np.float32)

    def add(self, samples: npt.NDArray[np.float32], rate_hz: int) -> None:
        held = np.concatenate([self._rest, samples])
        frame = rate_hz // FRAMES_A_S
        whole = len(held) - len(held) % frame
        frames, self._rest = held[:whole].reshape(-1, frame), held[whole:]
        power = np.maximum((frames**2).mean(1), 10 ** (-FULL_DB / 10))
        self._loudness += np.clip(FULL_DB + 10 * np.log10(power), 0, 255).astype(np.uint8).tobytes()

    def until(self, end_s: float | None = None) -> float:
        """Seconds of speech in the sound before `end_s`, or in all that there is."""
        said = np.concatenate([[0], np.cumsum(self._is_speech())])
        end = len(self._loudness) if end_s is None else end_s * FRAMES_A_S
        return float(np.interp(end, np.arange(len(said)), said)) / FRAMES_A_S

    def _is_speech(self) -> npt.NDArray[np.bool_]:
        """Of each frame."""
        loudness = np.frombuffer(bytes(self._loudness), np.uint8).astype(int)
        is_speech = loudness > max(loudness.max(initial=0) - BELOW_DB, SILENCE_DB)
        if len(loud := np.flatnonzero(is_speech)):
            gaps = np.diff(loud)
            is_speech[loud[0] : loud[-1]] |= np.repeat(gaps <= PAUSE, gaps)
        return is_speech
