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
