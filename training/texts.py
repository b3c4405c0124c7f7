"""Texts that are read aloud: what the world asks and answers, words in any order, and letters."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
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


def drawn_texts(count: int, split: Split, seed: int, but: Container[str] = ()) -> Texts:
    """`count` texts of each kind, without the repetitions among them and those that are in `but`.

    An item that is held out may have the answer of another one, and short texts come twice in any two draws: what is
    held out is drawn `but` for all that is trained.
    """
    texts = {}
    for kind, make in _MAKERS.items():
        rng = Random(f"{kind} {split} {seed}")
        texts[kind] = [text for text in dict.fromkeys(make(rng, split) for _ in range(count)) if text not in but]
    return texts


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
