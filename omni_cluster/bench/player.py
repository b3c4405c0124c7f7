"""A player that starts with the first sound and plays what it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omni_cluster.bench.record import AudioArrival


@dataclass(frozen=True, slots=True)
class Stalls:
    """How often the player ran dry before the sound was over, and how many seconds it stood still in all."""

    underruns: int
    stall_s: float


def play(chunks: Sequence[AudioArrival], rate_hz: int) -> Stalls:
    """Plays chunks from when the first came, at `rate_hz`, without waiting for a second one."""
    gaps_s = [gap_s for gap_s, _ in _timed(chunks, rate_hz) if gap_s > 0]
    return Stalls(len(gaps_s), sum(gaps_s))


def played_at_s(chunks: Sequence[AudioArrival], sample: int, rate_hz: int) -> float:
    """When the same player gets to a sample that the chunks have, seconds since the request was sent."""
    for chunk, (_, starts_s) in zip(chunks, _timed(chunks, rate_hz), strict=True):
        if sample < chunk.samples:
            return starts_s + sample / rate_hz
        sample -= chunk.samples
    raise ValueError(f"the chunks end {sample} samples before the one that is asked for.")


def ends_at_s(chunks: Sequence[AudioArrival], rate_hz: int) -> float:
    """When the same player has played all, seconds since the request was sent; 0 where there is no sound."""
    ends_s = 0.0
    for chunk, (_, starts_s) in zip(chunks, _timed(chunks, rate_hz), strict=True):
        ends_s = starts_s + chunk.samples / rate_hz
    return ends_s


def _timed(chunks: Sequence[AudioArrival], rate_hz: int) -> Iterator[tuple[float, float]]:
    """For each chunk: the seconds that the player stood still before it, and when it began to play it."""
    dry_at_s = chunks[0].at_s if chunks else 0.0
    for chunk in chunks:
        starts_s = max(dry_at_s, chunk.at_s)
        yield starts_s - dry_at_s, starts_s
        dry_at_s = starts_s + chunk.samples / rate_hz
