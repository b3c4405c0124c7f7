"""Spoken questions and answers in large numbers, made by all cores and kept in files.

    python -m training.clips [--questions 10000] [--answers 10000] [--folder .cache/training]

prints how long they are, by kind. A shard is the same whenever it is made, and is made once.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import numpy as np

from training.speech import (
    ANSWER_HZ,
    ANSWER_VOICES,
    QUESTION_HZ,
    Sound,
    answer_sound,
    question_sound,
    question_voice,
)
from training.world import Item, Kind, Picture, Split, items

CACHE: Final = Path(".cache/training")
SHARD_CLIPS: Final = 64
"""Some 5 MB."""
MAX_CLIPS: Final = 100_000
"""Of one role and split: some 8 GB."""


class Role(StrEnum):
    """Who speaks."""

    QUESTION = "question"
    ANSWER = "answer"


RATES_HZ: Final = {Role.QUESTION: QUESTION_HZ, Role.ANSWER: ANSWER_HZ}


@dataclass(frozen=True, slots=True)
class Clip:
    """What is said of an item; `speaker`: the answer's voice, empty for a question."""

    item: Item
    sound: Sound
    speaker: str = ""


def clips(
    role: Role, split: Split, count: int, folder: Path = CACHE, processes: int = os.cpu_count() or 1
) -> Iterator[Clip]:
    """The first `count`, in order; those that the folder lacks are made. Raises NoEspeak."""
    if not 0 <= count <= MAX_CLIPS:
        raise ValueError(f"count is {count}; use 0 to {MAX_CLIPS}.")
    folder.mkdir(parents=True, exist_ok=True)
    _remove_old(folder)
    paths = {_path(folder, role, split, number): number for number in range(math.ceil(count / SHARD_CLIPS))}
    missing = [number for path, number in paths.items() if not path.exists()]
    if missing:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(partial(_keep, folder, role, split), missing))
    yield from itertools.islice((clip for path in paths for clip in _read(path)), count)


def made(role: Role, split: Split, number: int) -> list[Clip]:
    """The clips of one shard."""
    rng = Random(f"{role} {split} {number}")
    its = itertools.islice(items(split, number), SHARD_CLIPS)
    if role is Role.QUESTION:
        return [Clip(it, question_sound(it.question, question_voice(rng, split), rng)) for it in its]
    speakers = itertools.cycle(ANSWER_VOICES)
    return [Clip(it, answer_sound(it.answer, speaker), speaker) for it, speaker in zip(its, speakers, strict=False)]


def _keep(folder: Path, role: Role, split: Split, number: int) -> None:
    _write(_path(folder, role, split, number), made(role, split, number))


def _path(folder: Path, role: Role, split: Split, number: int) -> Path:
    return folder / f"{_version()}-{role}-{split}-{number:05d}.npz"


def _remove_old(folder: Path) -> None:
    """What another version made is not read again."""
    for path in folder.glob("*.npz"):
        if not path.name.startswith(_version()):
            path.unlink(missing_ok=True)


@functools.cache
def _version() -> str:
    """Of what the clips are made by."""
    sources = sorted(Path(__file__).parent / f"{name}.py" for name in ("words", "phrases", "world", "speech", "clips"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:8]


def _write(path: Path, its: list[Clip]) -> None:
    sound = np.concatenate([clip.sound for clip in its])
    named = [{**asdict(clip.item), "speaker": clip.speaker, "samples": len(clip.sound)} for clip in its]
    unfinished = path.with_suffix(f".{os.getpid()}")
    with unfinished.open("wb") as file:
        np.savez(file, sound=(sound * (2**15 - 1)).astype(np.int16), named=np.array(json.dumps(named)))
    unfinished.replace(path)


def _read(path: Path) -> Iterator[Clip]:
    with np.load(path) as shard:
        sound, named = shard["sound"].astype(np.float32) / np.float32(2**15 - 1), json.loads(str(shard["named"]))
    end = 0
    for it in named:
        start, end = end, end + it["samples"]
        picture = Picture(**it["picture"]) if it["picture"] else None
        yield Clip(Item(Kind(it["kind"]), it["question"], it["answer"], picture), sound[start:end], it["speaker"])


# ------------------------------------------------------------------ the command


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.clips", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--questions", type=int, default=10_000)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, default=CACHE)
    asked = parser.parse_args()
    for role, count in ((Role.QUESTION, asked.questions), (Role.ANSWER, asked.answers)):
        _print_hours(role, count, asked.folder)


def _print_hours(role: Role, count: int, folder: Path) -> None:
    started = time.monotonic()
    seconds: Counter[str] = Counter()
    for clip in clips(role, Split.TRAIN, count, folder):
        seconds[clip.item.kind] += len(clip.sound) / RATES_HZ[role]  # type: ignore[assignment]
    hours = ", ".join(f"{kind} {its_s / 3600:.2f}" for kind, its_s in seconds.most_common())
    total_s = sum(seconds.values())
    print(
        f"{role}: {count} clips, {total_s / 3600:.2f} h, {total_s / max(count, 1):.2f} s each, made or read in "
        f"{time.monotonic() - started:.0f} s. Hours by kind: {hours}."
    )


if __name__ == "__main__":
    main()
