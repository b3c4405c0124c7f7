"""When a client runs out of sound."""

from __future__ import annotations

from omni_cluster.engine.playback import Playback


def test_first_sound_is_due_at_once() -> None:
    assert Playback().due_s(now_s=7.0) == 7.0


def test_later_sound_is_due_when_the_player_has_played_what_it_got() -> None:
    playback = Playback()
    playback.deliver(0.25, now_s=10.0)
    assert playback.due_s(now_s=10.0) == 10.25
    playback.deliver(0.5, now_s=10.5)
    assert playback.due_s(now_s=10.5) == 11.0  # it stood still from 10.25 to 10.5


def test_sound_that_comes_in_time_is_played_behind_what_is_there() -> None:
    playback = Playback()
    playback.deliver(1.0, now_s=10.0)
    playback.deliver(0.5, now_s=10.5)
    assert playback.due_s(now_s=10.5) == 11.5


def test_what_is_left_is_nothing_before_the_first_sound_and_after_the_last() -> None:
    playback = Playback()
    assert playback.left_s(10.0) == 0.0
    playback.deliver(0.5, now_s=10.0)
    assert (playback.left_s(10.25), playback.left_s(11.0)) == (0.25, 0.0)


def test_a_delayed_player_has_as_much_more_time_and_sound_is_due_as_without() -> None:
    playback = Playback()
    playback.deliver(0.25, now_s=10.0, delay_s=0.0625)
    assert (playback.due_s(10.0), playback.left_s(10.0)) == (10.25, 0.3125)
    playback.deliver(0.5, now_s=10.3125)
    assert playback.stall_s == 0 and playback.due_s(10.3125) == 10.75
    playback.deliver(0.5, now_s=11.0)
    assert playback.stall_s == 0.1875 and playback.left_s(11.0) == 0.5
    assert playback.due_s(11.0) == 11.4375
