"""How long words are said: which word of a text each of its codes says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from training.codes import Codes

MEASURED: Final = 6_000
"""Texts by which words are measured."""
BEFORE, AFTER = 3, 10
"""Silent codes around a text."""


@dataclass(frozen=True, slots=True)
class Durations:
    """How many codes a word has, whatever is around it; the last one of a text has `more`."""

    words: Mapping[str, float]
    more: float

    @classmethod
    def measured(cls, codes: Codes) -> Durations:
        """By least squares: a text is as long as its words together."""
        texts = [*codes][:: max(1, len(codes) // MEASURED)]
        numbers = {word: place for place, word in enumerate(sorted({word for text in texts for word in text.split()}))}
        counts = np.zeros((len(texts), len(numbers) + 1))
        counts[:, -1] = 1
        for row, text in zip(counts, texts, strict=True):
            np.add.at(row, [numbers[word] for word in text.split()], 1)
        spoken = np.array([len(codes[text]) - BEFORE - AFTER for text in texts])
        # A word in a single text is as long as others, unless that text says much else.
        usual = spoken.sum() / counts[:, :-1].sum()
        found = np.linalg.solve(
            counts.T @ counts + 0.03 * np.eye(counts.shape[1]),
            counts.T @ (spoken - counts[:, :-1].sum(1) * usual),
        )
        return cls({word: max(1.0, usual + found[place]) for word, place in numbers.items()}, max(0.0, found[-1]))

    def words_of(self, text: str, count: int) -> np.ndarray:
        """Which word each of its `count` codes says, -1 in the silence around them: int64 `[count]`."""
        usual = sum(self.words.values()) / len(self.words)
        lengths = np.array([self.words.get(word, usual) for word in text.split()])
        lengths[-1] += self.more
        ends = np.rint(np.cumsum(lengths) * (count - BEFORE - AFTER) / lengths.sum())
        said = np.searchsorted(ends, np.arange(count) - BEFORE, side="right")
        return np.where((np.arange(count) < BEFORE) | (said >= len(lengths)), -1, said)
