"""What tests say to a session."""

from __future__ import annotations

import numpy as np

from omni_cluster.bench.realtime import recording
from tests.server.speaker import RATE_HZ


def sentences() -> tuple[np.ndarray, np.ndarray]:
    """Each in samples of 16 bits."""
    samples = recording().samples
    loud = np.convolve(np.abs(samples.astype(float)), np.ones(RATE_HZ // 20) / (RATE_HZ // 20), "same") > 60
    quiet = np.flatnonzero(~loud[RATE_HZ // 4 : -RATE_HZ // 4]) + RATE_HZ // 4
    return samples[: quiet[0]], samples[quiet[-1] :]


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * RATE_HZ), np.int16)
