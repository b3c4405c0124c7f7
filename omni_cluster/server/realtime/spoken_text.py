"""Which part of an answer's text was heard when its sound was stopped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from typing import Final, Protocol

USUAL_LETTERS_PER_S: Final = 17.0
"""Of English speech without its pauses."""
USUAL_FOR_S: Final = 2.0
"""So much speech of a session counts as said at the usual pace: one short answer is no measure of the next."""
MOST_EARLIER: Final = 8
"""Answers that tell the pace of the next one."""
SYLLABLE: Final = 3
"""Letters that take as long as a syllable. No word is shorter, be it a letter that is spelled."""
HEARD_FROM: Final = 0.5
"""Share of a word from which it is understood, though the rest was not played."""
ROUNDING: Final = 1e-6
"""Of a letter: seconds are added up piece by piece, and at the sound's end the last word was heard, too."""

_SIGNS: Final = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Of Chinese and Japanese, which put no spaces between words: each is cut as a word is."""
_WORD: Final = re.compile(rf"[{_SIGNS}][^\w\s]*|[^\s{_SIGNS}]+")
_SIGN: Final = re.compile(rf"[{_SIGNS}]")
_SYLLABLE: Final = re.compile(rf"[{_SIGNS}\uac00-\ud7a3\d]")
"""Signs, those of Korean too, and digits."""


class Spoken(Protocol):
    """An answer: `text`, of which the sound so far has `speech_s` of speech. `is_whole`: it says all of the text."""

    @property
    def text(self) -> str: ...
    @property
    def speech_s(self) -> float: ...
    @property
    def is_whole(self) -> bool: ...


def heard_text(text: str, letters: float) -> str:
    """The beginning of the text, to the last word of which so many letters of it have the half.

    The talker aligns no text with its sound, so the letters are taken as spread evenly over its speech.
    """
    end, begins = 0, 0.0
    for word in _WORD.finditer(text):
        length = _length(word[0])
        if length and begins + HEARD_FROM * length > letters + ROUNDING:
            return text[:end]
        begins, end = begins + length, word.end() if length else end
    return text


def letters_of(text: str) -> int:
    """How long it takes to say, in letters: with the spaces, and without marks."""
    return sum(map(_length, _WORD.findall(text)))


def letters_per_s(answer: Spoken, earlier: Iterable[Spoken]) -> float:
    """Of its speech. It is known once the sound is whole; what is made of it says at least that it is no faster.

    Before that the `earlier` answers tell it, the latest first, whose pace is that of their language and voice.
    """
    if not answer.speech_s:
        return 0.0
    most = letters_of(answer.text) / answer.speech_s
    if answer.is_whole:
        return most
    whole = list(islice((each for each in earlier if each.is_whole and each.speech_s), MOST_EARLIER))
    said = USUAL_FOR_S * USUAL_LETTERS_PER_S + sum(letters_of(each.text) for each in whole)
    return min(most, said / (USUAL_FOR_S + sum(each.speech_s for each in whole)))


def _length(word: str) -> int:
    """In letters, with the space behind it; 0 of marks alone, which have no sound."""
    letters = sum(map(str.isalnum, word)) + (SYLLABLE - 1) * len(_SYLLABLE.findall(word))
    return letters and max(SYLLABLE, letters) + (_SIGN.match(word) is None)
