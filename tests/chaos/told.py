"""What a client was told."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Told:
    """What a client was told. `sound`: int16 at 24 kHz. `longest_pause_s`: between two events; `first_text_s` and
    `first_sound_s`: from when it asked. `request_id`: by which the server's log names the request.
    """

    text: str = ""
    sound: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int16))
    longest_pause_s: float = 0.0
    first_text_s: float | None = None
    first_sound_s: float | None = None
    request_id: str = ""

    def heard(self, text: str, sound: bytes, after_s: float) -> None:
        """Notes when the first of each came."""
        self.text += text
        if text and self.first_text_s is None:
            self.first_text_s = after_s
        if sound and self.first_sound_s is None:
            self.first_sound_s = after_s
