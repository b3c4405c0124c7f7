"""Where turns begin and end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from omni_cluster.openai_api.realtime.session import SemanticVad, ServerVad
from omni_cluster.server.realtime.voice_activity import PAUSES_AFTER, STARTS_AFTER, TurnDetector

WINDOW_MS = 32


def changes(detector: TurnDetector, likelihoods: Sequence[float]) -> list[tuple[int, str]]:
    """What is said, by the number of the window that says it."""
    said = [(i, detector.push(each)) for i, each in enumerate(likelihoods)]
    return [(i, change) for i, change in said if change is not None]


def plain(silence_ms: int = 320, threshold: float = 0.5) -> TurnDetector:
    return TurnDetector(ServerVad(type="server_vad", silence_duration_ms=silence_ms, threshold=threshold))


def test_a_turn_begins_with_speech_in_a_row_and_ends_after_its_silence() -> None:
    speech, silence = [0.9] * 10, [0.1] * 12
    assert changes(plain(), [0.1, *[0.9] * (STARTS_AFTER - 1), 0.1, *speech, *silence]) == [
        (2 * STARTS_AFTER, "started"),
        (STARTS_AFTER + 11 + PAUSES_AFTER - 1, "paused"),
        (STARTS_AFTER + 11 + 320 // WINDOW_MS - 1, "stopped"),
    ]


def test_a_pause_that_is_shorter_ends_nothing() -> None:
    pause = [0.1] * (320 // WINDOW_MS - 1)
    said = changes(plain(), [*[0.9] * 5, *pause, 0.9, *pause, 0.9])
    assert [change for _, change in said] == ["started", "paused", "resumed", "paused", "resumed"]
    assert changes(plain(), [*[0.9] * 5, *[0.1] * (PAUSES_AFTER - 1), 0.9]) == [(STARTS_AFTER - 1, "started")]


def test_what_is_just_below_the_threshold_is_no_silence_yet() -> None:
    assert changes(plain(), [*[0.9] * 5, *[0.4] * 40]) == [(STARTS_AFTER - 1, "started")]
    assert changes(plain(), [*[0.9] * 5, 0.3, *[0.4] * 40])[2:] == [(5 + 9, "stopped")]


def test_turns_come_one_after_the_other() -> None:
    turn = [*[0.9] * 4, *[0.0] * 10]
    assert [change for _, change in changes(plain(), turn * 2)] == ["started", "paused", "stopped"] * 2


@pytest.mark.parametrize(("eagerness", "windows"), [("high", 9), ("medium", 18), ("auto", 18), ("low", 37)])
def test_eagerness_is_a_wait(eagerness: str, windows: int) -> None:
    detector = TurnDetector(SemanticVad(type="semantic_vad", eagerness=eagerness))  # type: ignore[arg-type]
    assert changes(detector, [*[0.9] * 3, *[0.0] * 40])[2] == (3 + windows - 1, "stopped")


def test_silence_of_no_length_ends_a_turn_with_its_first_window() -> None:
    assert changes(plain(silence_ms=0), [0.9, 0.9, 0.9, 0.0]) == [(STARTS_AFTER - 1, "started"), (3, "stopped")]
