"""No work past the need, simulated: talkers that rest.

    python -m benchmarks.need_simulation [--ahead 4 6 8] [--loads 3 5 7 9 -32 16 24 48] [--seeds 0 1]
        [--contention fitted] [--json OUT.json]

`benchmarks/code2wav_simulation.py` and one rule. A talker rests while its player is ahead by so many seconds and
others need codes sooner: by codes and sound (`ahead`), or by sound alone (`heard`). Loads: requests a second, at once
from 16 on, or clients if negative.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path

from benchmarks.code2wav_simulation import Card, Contention, Load, Policy, Steps, Stream

CODE_S = 0.02
CONTENTIONS = {
    "none": Contention(0, 0, 0, 1, 1, 1),
    "half": Contention(1.0, 0.2, 0.2, 1.3, 1.25, 1.4),
    "fitted": Contention(),
    "more": Contention(3.5, 0.6, 0.6, 1.9, 1.7, 2.2),
}
MINUTE_REQUESTS = 40
"""Requests of an open loop for each request a second: 40 s of load."""
SHOWN = ("requests_per_s", "without_gap", "stall_p50_s", "stall_p95_s", "stall_p99_s", "first_audio_p50_s")
SHOWN += ("first_audio_p95_s", "whole_p50_s")


class RestingCard(Card):
    """Talkers that are ahead by `ahead_s` rest while another one is not; `heard`: codes do not count."""

    def __init__(self, policy: Policy, load: Load, contention: Contention, ahead_s: float, *, heard: bool) -> None:
        super().__init__(policy, load, contention)
        self._ahead_s, self._heard = ahead_s, heard

    def _at_work(self) -> list[Stream]:
        needy = [stream for stream in self._speaking if self._ahead_of(stream) <= self._ahead_s]
        return needy or self._speaking

    def _ahead_of(self, stream: Stream) -> float:
        if stream.dry_s == math.inf:
            return 0.0
        return stream.dry_s - self._now_s + (0 if self._heard else (stream.codes - stream.start) * CODE_S)


def load_of(number: float, seed: int) -> Load:
    if number < 0:
        return Load.closed(int(-number), int(-5 * number))
    return Load.burst(int(number)) if number >= 16 else Load.open(number, int(number * MINUTE_REQUESTS), seed)


def cards(options: argparse.Namespace, load: Load) -> Iterable[tuple[str, Card]]:
    of = CONTENTIONS[options.contention]
    yield "as it is", Card(Steps(1), load, of)
    for ahead_s, heard in itertools.product(options.ahead, (False, True)):
        name = f"rests {'heard' if heard else 'ahead'} {ahead_s:g} s"
        yield name, RestingCard(Steps(1), load, of, ahead_s, heard=heard)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ahead", type=float, nargs="*", default=[4, 6, 8])
    parser.add_argument("--loads", type=float, nargs="*", default=[3, 5, 7, 9, -32, 16, 24, 48])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--contention", choices=CONTENTIONS, default="fitted")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for number, seed in itertools.product(options.loads, options.seeds):
        for name, card in cards(options, load := load_of(number, seed)):
            figures = card.run().figures()
            shown = {key: round(figures[key], 4) for key in SHOWN}
            rows.append({"rule": name, "load": load.name, "seed": seed, **shown})
            told = " ".join(f"{figure:.3f}" for figure in shown.values())
            print(f"{load.name:10} {seed} {name:16} | {told}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
