"""Compares answers to the same questions: what is right in one and wrong in the other, and how alike sounds are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from training.asking import Answer
from training.marking import Mark
from training.speech import Sound

Taken = tuple[Sequence[Answer], Sequence[Mark]]
"""All answers to the questions, in their order, and their marks."""


@dataclass(frozen=True, slots=True)
class Turned:
    """Answers that are right in the base alone, and in the other alone: what McNemar's test counts."""

    lost: int
    gained: int

    @property
    def chance(self) -> float:
        """That as few differ in one direction if each is as likely to be right: the exact test, of both sides."""
        together, least = self.lost + self.gained, min(self.lost, self.gained)
        tail = sum(math.comb(together, few) for few in range(least + 1)) / 2**together
        return min(1.0, 2 * tail)


@dataclass(frozen=True, slots=True)
class Pairs:
    """`same_text`, `same_words` (those that are understood), `same_length` (of sound): answers that are as in the base.

    `like_db`: of sounds of one length, how much louder the base is than what differs, the median; None without any.
    """

    text: Turned
    spoken: Turned
    same_text: int
    same_words: int
    same_length: int
    like_db: float | None

    def as_json(self) -> dict[str, Any]:
        chances = {"text_chance": round(self.text.chance, 4), "spoken_chance": round(self.spoken.chance, 4)}
        return asdict(self) | chances


def paired(base: Taken, other: Taken) -> Pairs:
    marks = list(zip(base[1], other[1], strict=True))
    sounds = [(a.sound, b.sound) for a, b in zip(base[0], other[0], strict=True) if len(a.sound) == len(b.sound) > 0]
    likes = [likeness_db(*each) for each in sounds]
    return Pairs(
        text=_turned(marks, lambda mark: mark.is_right),
        spoken=_turned(marks, lambda mark: mark.is_understood),
        same_text=sum(a.said == b.said for a, b in marks),
        same_words=sum(a.understood == b.understood for a, b in marks),
        same_length=len(sounds),
        like_db=round(float(np.median(likes)), 1) if likes else None,
    )


def _turned(marks: Sequence[tuple[Mark, Mark]], is_right: Callable[[Mark], bool]) -> Turned:
    flags = [(is_right(a), is_right(b)) for a, b in marks]
    return Turned(lost=flags.count((True, False)), gained=flags.count((False, True)))


MOST_DB = 96.0
"""Of equal sounds of 16 bits."""


def likeness_db(base: Sound, other: Sound) -> float:
    """Signal-to-noise ratio of `other`, whose noise is what differs from `base`."""
    signal, noise = float(np.sum(np.square(base))), float(np.sum(np.square(base - other)))
    if noise == 0:
        return MOST_DB
    return min(MOST_DB, 10 * math.log10(max(signal, 1e-12) / noise))
