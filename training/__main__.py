"""Makes the toy: data, each training, and the checkpoint that they are joined to.

    python -m training --out .cache/toy --at-most 25

Each training is a process of its own. What has ended is not begun again: the same command goes on where it stopped,
as long as it is given the same minutes and the same share.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.run import minutes_of_text

MINUTES = {"hearing": 3.0, "seeing": 1.0, "thinker": 8.0, "flow": 8.0, "vocoder": 12.0, "talker": 10.0}
POOL = {"pieces": 60_000, "pictures": 12_000, "exam": 600}
"""Of the thinker and its towers."""
DATA: Mapping[str, Mapping[str, int]] = {
    "hearing": {**POOL, "size": 64},
    "seeing": {**POOL, "size": 256},
    "thinker": {**POOL, "size": 128},
    "wave_data": {"sayings": 3_000},
    "flow": {"batch": 64},
    "vocoder": {"batch": 32},
    "talker": {
        "pieces": 8_000, "pictures": 2_000, "items": 40_000, "texts": 12_000, "exam": 300, "generated": 64, "size": 384,
    },
}  # fmt: skip
"""Of each command; `size` and `batch` are what a step has of it."""
LEAST = 8
"""Of a kind of data, however small its share."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command: a module of this folder, and its options. `minutes`: of a training, None of what is no training."""

    module: str
    options: Mapping[str, Any]
    minutes: float | None = None

    def command(self, at_most: float | None) -> list[str]:
        options = dict(self.options)
        if self.minutes is not None:
            options |= {"minutes": self.minutes} | ({"at-most": at_most} if at_most is not None else {})
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [sys.executable, "-m", f"{__package__}.{self.module}", *words]


def steps(out: Path, minutes_share: float, data_share: float) -> Iterator[Step]:
    """In the order in which they need each other. The shares are of the shipped toy's minutes and data."""
    towers, thinker, wave, code2wav, talker = (
        out / name for name in ("towers", "thinker", "wave", "code2wav", "talker")
    )

    def part(name: str, folder: Path, **options: Any) -> Step:
        data = {name: max(LEAST, round(count * data_share)) for name, count in DATA[name].items()}
        minutes = MINUTES[name] * minutes_share if name in MINUTES else None
        return Step(name, {"out": folder, **options, **data}, minutes)

    yield part("hearing", towers, pool=out / "pool")
    yield part("seeing", towers, pool=out / "pool")
    yield part("thinker", thinker, pool=out / "pool", init=towers)
    yield part("wave_data", wave)
    yield part("flow", wave)
    yield part("vocoder", wave)
    yield Step("code2wav", {"data": wave, "out": code2wav})
    yield part("talker", talker, thinker=thinker, codebook=code2wav / "codebook.pt")
    yield Step("join", {"thinker": thinker, "talker": talker, "code2wav": code2wav, "out": out / "checkpoint"})


class TimeIsOver(Exception):
    """Before all is made."""


def make(out: Path, todo: Iterator[Step], at_most: float | None) -> None:
    """Raises TimeIsOver, and CalledProcessError of a command that failed, which has said why."""
    out.mkdir(parents=True, exist_ok=True)
    ends = None if at_most is None else time.monotonic() + 60 * at_most
    for step in todo:
        done = out / f"{step.module}.done"
        if done.exists():
            continue
        left = None if ends is None else (ends - time.monotonic()) / 60
        if left is not None and left <= 0:
            raise TimeIsOver
        print(f"{step.module}:", flush=True)
        subprocess.run(step.command(left), check=True)
        if ends is not None and step.minutes is not None and time.monotonic() >= ends:
            raise TimeIsOver  # it may have minutes left
        done.touch()


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the toy, from its data to its checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="the folder of all that is made")
    parser.add_argument("--at-most", type=minutes_of_text, help="minutes of this run; all that are left, unless given")
    parser.add_argument("--minutes-share", type=_part, default=1.0, help="of the shipped toy's 42 minutes of training")
    parser.add_argument("--data-share", type=_part, default=1.0, help="of the shipped toy's data")
    given = parser.parse_args()
    try:
        make(given.out, steps(given.out, given.minutes_share, given.data_share), given.at_most)
    except TimeIsOver:
        print("time is over: the same command goes on from here.")
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd[1:3])} failed; what it printed says why.")
    else:
        print(f"{given.out / 'checkpoint'} is the checkpoint.")


def _part(text: str) -> float:
    if not 0 < (share := float(text)) <= 10:
        raise argparse.ArgumentTypeError(f"{text} is no share: give a number above 0 and at most 10, such as 0.1.")
    return share


if __name__ == "__main__":
    main()
