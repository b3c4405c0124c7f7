"""What the talker is to say: codes of texts, made once by all processors and kept, and which word each code says."""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from training.codes import Codebook
from training.files import written_whole

Codes = Mapping[str, Sequence[int]]
"""Of what may be said, by its text."""
CHUNK: Final = 64
MEASURED: Final = 6_000
"""Texts by which words are measured."""
BEFORE, AFTER = 3, 10
"""Silent codes around a text."""


def codes_of_texts(texts: Iterable[str], codebook: Path, kept: Path, workers: int) -> Codes:
    """`kept`: the file of what is made already; of another codebook it is made anew. Raises NoEspeak."""
    made_by = hashlib.sha256(codebook.read_bytes()).hexdigest()
    codes: dict[str, Sequence[int]] = {}
    if kept.is_file() and (earlier := json.loads(kept.read_text()))["codebook"] == made_by:
        codes = earlier["codes"]
    asked = sorted({*texts})
    if lacking := [text for text in asked if text not in codes]:
        codes |= zip(lacking, codes_of_all(lacking, partial(_codes_of, codebook), workers), strict=True)
        with written_whole(kept) as file:
            file.write_text(json.dumps({"codebook": made_by, "codes": codes}))
    return {text: codes[text] for text in asked}


def codes_of_all(
    texts: Sequence[str], codes_of: Callable[[str], Sequence[int]], workers: int
) -> Iterator[Sequence[int]]:
    """In order. `workers`: processes that make them."""
    if workers == 0:
        yield from map(codes_of, texts)
        return
    # Forked, for each would import torch otherwise: nothing has been computed yet.
    with multiprocessing.get_context("fork").Pool(workers, torch.set_num_threads, (1,)) as processes:
        yield from processes.imap(codes_of, texts, CHUNK)


def _codes_of(codebook: Path, text: str) -> list[int]:
    return _loaded(codebook).codes_of(text)


@functools.cache
def _loaded(codebook: Path) -> Codebook:
    return Codebook.load(codebook)


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many codes a word has, whatever is around it; the last one of a text has `more`."""

    words: Mapping[str, float]
    more: float

    @classmethod
    def measured(cls, codes: Codes) -> Lengths:
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
