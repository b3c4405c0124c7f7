"""What the thinker is given of an item, in the words of the serving side, and what it is to write.

The application knows three ways to ask: typed, spoken, and "write down what is said", which has a prompt of its own.
"""

from __future__ import annotations

import re
from enum import StrEnum
from random import Random
from typing import Any, Final

from omni_cluster.models.family import Hearing
from omni_cluster.models.qwen2_5_omni.hearing import messages_of
from training import words
from training.world import Item

LANGUAGES: Final = (None, "English")
"""What a client may say that it speaks, when it asks for a transcript."""
ASKING: Final = ("what", "who", "how", "which", "why", "where", "are", "can", "do", "did")
SIGNS: Final = {"plus": "+", "minus": "-"}
DIGITS: Final = {word: str(number) for number, word in enumerate(words.NUMBERS)}


class Way(StrEnum):
    """How an item is asked."""

    TYPED = "typed"
    SPOKEN = "spoken"
    TRANSCRIPT = "transcript"


def messages(item: Item, way: Way, rng: Random) -> list[dict[str, Any]]:
    """For the checkpoint's chat template. The caller has the question's sound, and the drawn picture."""
    if way is Way.TRANSCRIPT:
        return messages_of(Hearing(rng.choice(LANGUAGES), None, ""))
    picture = [{"type": "image"}] if item.picture else []
    question = {"type": "audio"} if way is Way.SPOKEN else {"type": "text", "text": typed(item.question, rng)}
    content = [*picture, question]
    if rng.random() < 0.3:
        content.reverse()
    return [{"role": "user", "content": content}]


def reply(item: Item, way: Way) -> str:
    """What the thinker is to write."""
    return item.question if way is Way.TRANSCRIPT else item.answer


def typed(question: str, rng: Random) -> str:
    """As people type: plain, or with a capital, a mark at the end and digits."""
    if rng.random() < 0.4:
        return question
    if rng.random() < 0.5:
        question = _with_digits(question)
    if rng.random() < 0.3:
        question = question.replace("colour", "color")
    mark = "?" if question.split()[0] in ASKING else "."
    return question[0].upper() + question[1:] + (mark if rng.random() < 0.8 else "")


def _with_digits(question: str) -> str:
    digits = " ".join(DIGITS.get(word, word) for word in question.split())
    return re.sub(r"(?<=\d) (plus|minus) (?=\d)", lambda sign: f" {SIGNS[sign[1]]} ", digits)
