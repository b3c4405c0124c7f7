"""Spoken questions and drawn pictures, made once by all processors and kept for the whole training.

    python -m training.pool FOLDER --pieces 60000 --pictures 12000

makes them ahead of a training that is given the folder. Sounds are kept without noise and silence: the training adds
these, each time others.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from training.files import written_whole
from training.pictures import draw as draw_picture
from training.speech import QUESTION_HZ, question_voice, scaled, speak
from training.world import Item, Kind, Split, draw

CHUNK = 128
FULL_SCALE = 32_768
"""Of a sample, as an int16."""
LOUDNESS = 0.08
"""Root mean square of a recording, of full scale."""


@dataclass(frozen=True)
class Pool:
    """`spoken`: an item for each piece, whose samples, int16 at 16 kHz, go from `begins` to the next one's.

    `shown`: items with pictures, uint8 `[height, width, 3]` in `pictures`, whose sides are whole tokens.
    """

    spoken: Sequence[Item]
    samples: np.ndarray
    begins: np.ndarray
    shown: Sequence[Item]
    pictures: Sequence[np.ndarray]

    def recorded(self, piece: int) -> int:
        """Samples of a piece."""
        return int(self.begins[piece + 1] - self.begins[piece])

    @cached_property
    def pieces_of(self) -> Mapping[str, Sequence[int]]:
        """Which pieces say a question."""
        pieces = defaultdict[str, list[int]](list)
        for piece, item in enumerate(self.spoken):
            pieces[item.question].append(piece)
        return pieces

    @cached_property
    def unseen(self) -> Sequence[int]:
        """Pieces that need no picture."""
        return [piece for piece, item in enumerate(self.spoken) if item.picture is None]


def make_pool(split: Split, pieces: int, pictures: int, seed: int, workers: int) -> Pool:
    """The same for the same arguments, but for `workers`: processes that make it."""
    spoken = [*_made(partial(_speak, split, seed), pieces, workers)]
    shown = [*_made(partial(_show, split, seed), pictures, workers)]
    return Pool(
        spoken=[item for item, _ in spoken],
        samples=np.concatenate([np.zeros(0, np.int16), *(samples for _, samples in spoken)]),
        begins=np.cumsum([0, *(len(samples) for _, samples in spoken)]),
        shown=[item for item, _ in shown],
        pictures=[picture for _, picture in shown],
    )


def kept_pool(folder: Path, make: Callable[[], Pool]) -> Pool:
    """The pool of an earlier run, from a folder, which `make` fills otherwise."""
    samples, rest = folder / "samples.npy", folder / "pool.pickle"
    if rest.is_file():
        kept: Pool = pickle.loads(rest.read_bytes())
        return replace(kept, samples=np.load(samples))
    pool = make()
    folder.mkdir(parents=True, exist_ok=True)
    np.save(samples, pool.samples)
    with written_whole(rest) as file:
        file.write_bytes(pickle.dumps(replace(pool, samples=pool.samples[:0])))
    return pool


def _made(make: Callable[[range], Any], count: int, workers: int) -> Iterator[tuple[Item, np.ndarray]]:
    chunks = [range(begin, min(begin + CHUNK, count)) for begin in range(0, count, CHUNK)]
    if workers == 0:
        yield from chain.from_iterable(map(make, chunks))
        return
    # Forked, for each would import torch otherwise: nothing has been computed yet.
    with multiprocessing.get_context("fork").Pool(workers) as processes:
        yield from chain.from_iterable(processes.imap(make, chunks))


def _speak(split: Split, seed: int, numbers: range) -> list[tuple[Item, np.ndarray]]:
    return [_spoken(split, Random(f"spoken {split} {seed} {number}")) for number in numbers]


def _spoken(split: Split, rng: Random) -> tuple[Item, np.ndarray]:
    item = draw(rng, split)
    sound = scaled(speak(item.question, question_voice(rng, split), QUESTION_HZ), LOUDNESS)
    return item, (sound * FULL_SCALE).astype(np.int16)


def _show(split: Split, seed: int, numbers: range) -> list[tuple[Item, np.ndarray]]:
    return [_shown(split, Random(f"shown {split} {seed} {number}")) for number in numbers]


def _shown(split: Split, rng: Random) -> tuple[Item, np.ndarray]:
    while (item := draw(rng, split, Kind.PICTURE)).picture is None:
        pass
    return item, np.asarray(draw_picture(item.picture).convert("RGB"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes sounds and pictures to train on.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pieces", type=int, default=60_000)
    parser.add_argument("--pictures", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.monotonic()
    make = partial(make_pool, Split.TRAIN, given.pieces, given.pictures, given.seed, os.cpu_count() or 1)
    pool = kept_pool(given.folder, make)
    hours = len(pool.samples) / QUESTION_HZ / 3600
    seconds = time.monotonic() - began
    print(f"{len(pool.spoken)} sounds, {hours:.1f} h, and {len(pool.shown)} pictures in {seconds:.0f} s")


if __name__ == "__main__":
    main()
