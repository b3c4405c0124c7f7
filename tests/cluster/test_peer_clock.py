"""Times of another host's clock."""

from __future__ import annotations

import pytest

from omni_cluster.cluster.peer_clock import WINDOW_S, PeerClock, boot_id


class Hosts:
    """This host's clock, and the other's, which is `ahead_s` ahead."""

    def __init__(self, ahead_s: float) -> None:
        self.now_s, self.ahead_s = 1e9, ahead_s
        self.clock = PeerClock(is_own=False, clock=lambda: self.now_s)

    def hear(self, under_way_s: float, pause_s: float = 0.0) -> None:
        """A frame that was under way for so long, a pause after the last one."""
        self.now_s += pause_s
        self.clock.heard(self.now_s + self.ahead_s - under_way_s)

    def age_s(self, made_before_s: float) -> float:
        """Of what the other host made so long ago."""
        return self.now_s - self.clock.own_s(self.now_s + self.ahead_s - made_before_s)


@pytest.mark.parametrize("ahead_s", [0.0, 86_400.0, -0.25])
def test_an_age_is_right_but_for_the_fastest_frames_time(ahead_s: float) -> None:
    hosts = Hosts(ahead_s)
    for under_way_s in (0.2, 0.001, 3.0, 0.05):
        hosts.hear(under_way_s, pause_s=1)
    assert hosts.age_s(0.5) == pytest.approx(0.5 - 0.001, abs=1e-6)


def test_a_clock_that_is_set_counts_after_a_while() -> None:
    hosts = Hosts(ahead_s=0.0)
    hosts.hear(0.001)
    hosts.ahead_s = -7.0
    for _ in range(3):
        hosts.hear(0.001, pause_s=WINDOW_S + 1)
    assert hosts.age_s(0.5) == pytest.approx(0.5 - 0.001, abs=1e-6)


def test_an_own_clock_that_is_set_back_begins_a_window() -> None:
    hosts = Hosts(ahead_s=0.0)
    hosts.hear(0.001)
    hosts.now_s -= 7.0
    hosts.ahead_s += 7.0
    hosts.hear(0.001)
    hosts.hear(0.001, pause_s=WINDOW_S + 1)
    hosts.hear(0.001, pause_s=WINDOW_S + 1)
    assert hosts.age_s(0.5) == pytest.approx(0.5 - 0.001, abs=1e-6)


def test_processes_of_one_host_share_a_clock() -> None:
    clock = PeerClock(is_own=True)
    clock.heard(5.0)
    assert clock.own_s(7.0) == 7.0
    assert boot_id() == boot_id() != ""
