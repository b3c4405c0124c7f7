"""How like two sounds are."""

from __future__ import annotations

import numpy as np


def snr_db(made: np.ndarray, wanted: np.ndarray) -> float:
    return float(10 * np.log10((wanted**2).sum() / ((made - wanted) ** 2).sum()))


STREAMING_SNR_DB = 45.0
