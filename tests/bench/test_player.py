from __future__ import annotations

import pytest

from omni_cluster.bench.player import Stalls, play
from omni_cluster.bench.record import AudioArrival

SECOND = 24_000


@pytest.mark.parametrize(
    ("chunks", "underruns", "stall_s"),
    [
        ([], 0, 0.0),
        ([(5.0, 2)], 0, 0.0),  # the wait for the first sound is no underrun
        ([(5.0, 2), (7.0, 1)], 0, 0.0),  # just in time
        ([(5.0, 2), (5.0, 2), (8.5, 1)], 0, 0.0),
        ([(5.0, 2), (7.5, 1)], 1, 0.5),
        ([(5.0, 2), (7.5, 1), (8.0, 1), (12.0, 1)], 2, 3.0),  # after a stall the player goes on from there
    ],
)
def test_the_player_runs_dry_when_sound_comes_after_the_last_was_played(
    chunks: list[tuple[float, float]], underruns: int, stall_s: float
) -> None:
    played = play([AudioArrival(at_s, int(duration_s * SECOND)) for at_s, duration_s in chunks])
    assert played == Stalls(underruns, pytest.approx(stall_s))  # type: ignore[arg-type]
