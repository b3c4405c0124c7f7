"""What of a text was heard."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from omni_cluster.server.realtime.spoken_text import (
    MOST_EARLIER,
    USUAL_FOR_S,
    USUAL_LETTERS_PER_S,
    heard_text,
    letters_of,
    letters_per_s,
)

FOX = "The quick brown fox"
"""With their spaces the words have 4, 6, 6 and 4 letters."""


@dataclass
class Spoken:
    """An answer."""

    text: str
    speech_s: float
    is_whole: bool = True


@pytest.mark.parametrize(
    ("letters", "text"),
    [
        (0, ""),
        (1.9, ""),
        (2, "The"),
        (6.9, "The"),
        (7, "The quick"),
        (12.9, "The quick"),
        (13, "The quick brown"),
        (17.9, "The quick brown"),
        (18, FOX),
        (99, FOX),
    ],
)
def test_a_text_is_cut_behind_the_last_word_that_was_half_heard(letters: float, text: str) -> None:
    assert heard_text(FOX, letters) == text


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("The quick", 10),
        ("quick, brown!", 12),  # marks are not said
        ("well - then", 10),
        ("a is", 8),  # no word is shorter than a syllable
        ("g a r", 12),
        ("in 2026", 4 + 13),  # each digit is a word
        ("你好", 6),
        ("你好。", 6),
        ("한국", 7),  # with spaces, so with one here
        ("... -", 0),
        ("", 0),
    ],
)
def test_the_letters_of_a_text_are_those_that_take_time(text: str, letters: float) -> None:
    assert letters_of(text) == letters


@pytest.mark.parametrize(
    ("text", "letters", "heard"),
    [
        ("今天天气很好。我们走吧。", 0, ""),
        ("今天天气很好。我们走吧。", 9, "今天天"),
        ("今天天气很好。我们走吧。", 18, "今天天气很好。"),
        ("今天天气很好。我们走吧。", 30, "今天天气很好。我们走吧。"),
        ("我用 Python 写", 6 + 7, "我用 Python"),
        ("東京タワー", 8, "東京タ"),
    ],
)
def test_where_no_spaces_are_between_words_a_text_is_cut_behind_a_sign(text: str, letters: float, heard: str) -> None:
    assert heard_text(text, letters) == heard


def test_marks_belong_to_the_word_before_them() -> None:
    text = "Well, yes - “你好。” Go!"
    # Letters with spaces: 5, 4, then two signs of 3, and 4.
    ends = ["", "Well,", "Well, yes", "Well, yes - “你", "Well, yes - “你好。”", text]
    assert [heard_text(text, letters) for letters in (0, 5, 9, 12, 15, 19)] == ends


@pytest.mark.parametrize("speech_s", [0.14, 1.2, 1.22, 20])
def test_at_the_end_of_its_sound_a_text_was_heard_whole(speech_s: float) -> None:
    answer = Spoken(FOX, speech_s)
    heard_s = sum(speech_s / 7 for _ in range(7))
    assert heard_text(FOX, heard_s * letters_per_s(answer, [])) == FOX


def test_an_answer_that_was_made_to_its_end_tells_its_own_pace() -> None:
    assert letters_per_s(Spoken(FOX, 2.0), [Spoken(FOX, 1.0)]) == 20 / 2.0


def test_before_its_end_the_pace_is_that_of_earlier_answers_and_the_usual_one() -> None:
    begun = Spoken(FOX, 0.1, is_whole=False)
    assert letters_per_s(begun, [begun]) == USUAL_LETTERS_PER_S
    earlier = [Spoken(FOX, 2.0), Spoken(FOX, 3.0), Spoken(FOX, 0.0), Spoken(FOX, 9.0, is_whole=False), begun]
    learned = (USUAL_FOR_S * USUAL_LETTERS_PER_S + 40) / (USUAL_FOR_S + 5.0)
    assert letters_per_s(begun, earlier) == learned
    assert letters_per_s(begun, earlier) == letters_per_s(begun, [Spoken(FOX, 2.0), Spoken(FOX, 3.0)])


def test_the_latest_answers_tell_the_pace() -> None:
    begun, latest, older = Spoken(FOX, 0.1, is_whole=False), Spoken(FOX, 2.0), Spoken(FOX, 20.0)
    learned = letters_per_s(begun, [latest] * MOST_EARLIER)
    assert letters_per_s(begun, [begun, *[latest] * MOST_EARLIER, older]) == learned
    assert letters_per_s(begun, [older, *[latest] * MOST_EARLIER]) < learned


def test_what_is_made_of_a_sound_says_that_it_is_no_faster() -> None:
    assert letters_per_s(Spoken(FOX, 4.0, is_whole=False), []) == 20 / 4.0


def test_nothing_is_heard_before_the_sound_speaks() -> None:
    assert letters_per_s(Spoken(FOX, 0.0, is_whole=False), []) == 0
    assert letters_per_s(Spoken(FOX, 0.0), []) == 0
