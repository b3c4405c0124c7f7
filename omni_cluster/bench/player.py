"""A player that starts with the first sound and plays what it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omni_cluster.api_client import SAMPLE_RATE_HZ
from omni_cluster.bench.record import AudioArrival


@dataclass(frozen=True, slots=True)
class Stalls:
    """How often the player ran dry before the sound was over, and how many seconds it stood still in all."""

    underruns: int
    stall_s: float


def play(chunks: Sequence[AudioArrival]) -> Stalls:
    """Plays chunks from when the first came, at 24 kHz, without waiting for a second one."""
    underruns, stall_s = 0, 0.0
    dry_at_s = chunks[0].at_s if chunks else 0.0
    for chunk in chunks:
        if chunk.at_s > dry_at_s:
            underruns += 1
            stall_s += chunk.at_s - dry_at_s
            dry_at_s = chunk.at_s
        dry_at_s += chunk.samples / SAMPLE_RATE_HZ
    return Stalls(underruns, stall_s)
