"""How sound, mel frames and codes lie in each other."""

from typing import Final

SAMPLE_RATE_HZ: Final = 24_000
HOP: Final = 240
FRAMES_A_CODE: Final = 2
SAMPLES_A_CODE: Final = HOP * FRAMES_A_CODE
