"""What of a text was heard."""

from __future__ import annotations

import pytest

from omni_cluster.server.realtime.spoken_text import heard_text


@pytest.mark.parametrize(
    ("heard_s", "text"),
    [
        (0, ""),
        (0.3, ""),
        (0.5, "The"),
        (0.9, "The"),
        (1.0, "The quick"),
        (1.9, "The quick brown"),
        (2.0, "The quick brown fox"),
        (9, "The quick brown fox"),
    ],
)
def test_a_text_is_cut_behind_a_word_that_was_heard_whole(heard_s: float, text: str) -> None:
    assert heard_text("The quick brown fox", heard_s, 9.6) == text


@pytest.mark.parametrize("codes", [7, 60, 61, 1000])
def test_at_the_end_of_its_sound_a_text_was_heard_whole(codes: int) -> None:
    text, code_s = "The quick brown fox", 480 / 24_000
    sound_s = sum(code_s for _ in range(codes))
    assert heard_text(text, codes * 20 / 1000, len(text) / sound_s) == text
