from __future__ import annotations

import pytest

from omni_cluster.bench.player import Stalls, play, played_at_s
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
    played = play([AudioArrival(at_s, int(duration_s * SECOND)) for at_s, duration_s in chunks], SECOND)
    assert played == Stalls(underruns, pytest.approx(stall_s))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chunks", "after_s", "at_s"),
    [
        ([(5.0, 2)], 0.0, 5.0),
        ([(5.0, 2)], 1.5, 6.5),
        ([(5.0, 2), (5.5, 2)], 3.0, 8.0),  # the second chunk waits for the first one's end
        ([(5.0, 2), (7.5, 1)], 2.25, 7.75),  # and the player for the second chunk
    ],
)
def test_a_sample_is_heard_when_the_player_gets_to_it(
    chunks: list[tuple[float, float]], after_s: float, at_s: float
) -> None:
    arrivals = [AudioArrival(came_s, int(duration_s * SECOND)) for came_s, duration_s in chunks]
    assert played_at_s(arrivals, int(after_s * SECOND), SECOND) == pytest.approx(at_s)
