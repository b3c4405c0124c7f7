"""Questions as people type them."""

from __future__ import annotations

import re
from random import Random
from typing import Final

from training import words

ASKING: Final = ("what", "who", "how", "which", "why", "where", "are", "can", "do", "did")
SIGNS: Final = {"plus": "+", "minus": "-"}
NAMES: Final = {name: name.capitalize() for name in words.DAYS + words.MONTHS}
DIGITS: Final = {word: str(number) for number, word in enumerate(words.NUMBERS)}


def typed(question: str, rng: Random) -> str:
    """As people type: plain, or with a capital, a mark at the end and digits."""
    if rng.random() < 0.4:
        return question
    if rng.random() < 0.5:
        question = _with_digits(question)
    if rng.random() < 0.3:
        question = question.replace("colour", "color")
    if rng.random() < 0.8:
        question = " ".join(NAMES.get(word, word) for word in question.split())
    mark = "?" if question.split()[0] in ASKING else "."
    return question[0].upper() + question[1:] + (mark if rng.random() < 0.8 else "")


def _with_digits(question: str) -> str:
    digits = " ".join(DIGITS.get(word, word) for word in question.split())
    return re.sub(r"(?<=\d) (plus|minus) (?=\d)", lambda sign: f" {SIGNS[sign[1]]} ", digits)
