"""Spoken questions and drawn pictures, made once by all processors and kept for the whole training.

    python -m training.pool FOLDER --pieces 60000 --pictures 12000

makes them ahead of a training that is given the folder. Sounds are kept without noise and silence: the training adds
these, each time others.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from random import Random

import numpy as np

from training.cores import CORES, by_cores
from training.files import written_whole
from training.pictures import draw as draw_picture
from training.speech import QUESTION_HZ, question_voice, scaled, speak
from training.world import Item, Kind, Split, draw

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


def make_pool(split: Split, pieces: int, pictures: int, seed: int, cores: int = CORES) -> Pool:
    """The same for the same arguments, whatever `cores` are."""
    spoken = [*by_cores(partial(_spoken, split, seed), range(pieces), cores)]
    shown = [*by_cores(partial(_shown, split, seed), range(pictures), cores)]
    return Pool(
        spoken=[item for item, _ in spoken],
        samples=np.concatenate([np.zeros(0, np.int16), *(samples for _, samples in spoken)]),
        begins=np.cumsum([0, *(len(samples) for _, samples in spoken)]),
        shown=[item for item, _ in shown],
        pictures=[picture for _, picture in shown],
    )


def kept_pool(folder: Path | None, make: Callable[[], Pool]) -> Pool:
    """The pool of an earlier run, from a folder, which `make` fills otherwise; a new one, where there is no folder."""
    if folder is None:
        return make()
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


def _spoken(split: Split, seed: int, number: int) -> tuple[Item, np.ndarray]:
    rng = Random(f"spoken {split} {seed} {number}")
    item = draw(rng, split)
    sound = scaled(speak(item.question, question_voice(rng, split), QUESTION_HZ), LOUDNESS)
    return item, (sound * FULL_SCALE).astype(np.int16)


def _shown(split: Split, seed: int, number: int) -> tuple[Item, np.ndarray]:
    rng = Random(f"shown {split} {seed} {number}")
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
    make = partial(make_pool, Split.TRAIN, given.pieces, given.pictures, given.seed)
    pool = kept_pool(given.folder, make)
    hours = len(pool.samples) / QUESTION_HZ / 3600
    seconds = time.monotonic() - began
    print(f"{len(pool.spoken)} sounds, {hours:.1f} h, and {len(pool.shown)} pictures in {seconds:.0f} s")


if __name__ == "__main__":
    main()
