"""Texts that are read aloud: what the world asks and answers, words in any order, and letters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final

from training.words import LETTERS
from training.world import Split, draw, vocabulary

Texts = Mapping[str, Sequence[str]]
"""Texts by their kind; each kind is read as often as another."""
ENDS: Final = ".!?"
WORDS: Final = tuple(vocabulary())
MOST_WORDS: Final = 10
MOST_LETTERS: Final = 9


def drawn_texts(count: int, split: Split, seed: int) -> Texts:
    """`count` texts of each kind, without the repetitions among them."""
    return {kind: _distinct(make, count, split, Random(f"{kind} {split} {seed}")) for kind, make in _MAKERS.items()}


def _distinct(make: Callable[[Random, Split], str], count: int, split: Split, rng: Random) -> list[str]:
    return [*dict.fromkeys(make(rng, split) for _ in range(count))]


def _answer(rng: Random, split: Split) -> str:
    return draw(rng, split).answer


def _question(rng: Random, split: Split) -> str:
    return draw(rng, split).question


def _words(rng: Random, split: Split) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, MOST_WORDS)))


def _letters(rng: Random, split: Split) -> str:
    return " ".join(rng.choices(LETTERS, k=rng.randint(1, MOST_LETTERS)))


_MAKERS: Final[Mapping[str, Callable[[Random, Split], str]]] = {
    "answer": _answer, "question": _question, "words": _words, "letters": _letters,
}  # fmt: skip


def written(text: str, rng: Random) -> str:
    """Now and then as people write it, with a capital and a mark, which are not said."""
    return text if rng.random() < 0.7 else text[:1].upper() + text[1:] + rng.choice(ENDS)


def plain(text: str) -> str:
    """What of it is said."""
    return text.lower().rstrip(ENDS)
