"""Adaptive playout delay, replayed over runs that were measured without one.

    python -m benchmarks.playout_delay RATE SEED FOLDER...

Takes the answers of `omni-cluster bench --rate RATE --seed SEED --save FOLDER`, as the client had them, and gives each
first chunk to its player as much later as code2wav's `PlayoutDelay` would by then, for several longest delays. A delay
changes nothing of what the stages do, so this is what the client of such a run would have had. Runs that are named
together are one server's, one after another.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omni_cluster.bench.load import poisson_arrivals
from omni_cluster.bench.result import REQUESTS_NAME
from omni_cluster.engine.playback import Playback
from omni_cluster.engine.sound.playout import PlayoutDelay

MOST_S = (0.0, 0.04, 0.06, 0.08, 0.1)
BETWEEN_RUNS_S = 1.0


@dataclass(frozen=True)
class Answer:
    """When a request was sent, and when each chunk of its sound came, with its length. In seconds."""

    sent_s: float
    came_s: tuple[float, ...]
    sound_s: tuple[float, ...]

    def later(self, by_s: float) -> Answer:
        return Answer(self.sent_s + by_s, tuple(at_s + by_s for at_s in self.came_s), self.sound_s)


def answers(folder: Path, rate_per_s: float, seed: int) -> list[Answer]:
    """Of one run; those with sound."""
    requests = [json.loads(line)["request"] for line in (folder / REQUESTS_NAME).read_text().splitlines()]
    sent_s = poisson_arrivals(rate_per_s, len(requests), seed)
    first = min(request["number"] for request in requests)
    return [
        Answer(
            at_s,
            tuple(at_s + chunk["at_s"] for chunk in request["audio"]),
            tuple(chunk["samples"] / request["sample_rate_hz"] for chunk in request["audio"]),
        )
        for request in requests
        if request["audio"]
        for at_s in [sent_s[request["number"] - first]]
    ]


def one_after_another(runs: Sequence[Sequence[Answer]]) -> Iterator[Answer]:
    begin_s = 0.0
    for run in runs:
        yield from (answer.later(begin_s) for answer in run)
        begin_s += max(answer.came_s[-1] for answer in run) + BETWEEN_RUNS_S


def replayed(run: Sequence[Answer], most_s: float) -> tuple[list[float], list[float]]:
    """First audio and underruns of each answer, in seconds, with a delay of at most `most_s`."""
    playout, players = PlayoutDelay(most_s), [Playback() for _ in run]
    first_audio_s = [0.0] * len(run)
    chunks = ((at_s, n, k) for n, answer in enumerate(run) for k, at_s in enumerate(answer.came_s))
    for at_s, number, chunk in sorted(chunks):
        player = players[number]
        delay_s = playout.of(player, at_s)
        if chunk == 0:
            first_audio_s[number] = at_s + delay_s - run[number].sent_s
        player.deliver(run[number].sound_s[chunk], at_s, delay_s)
    return first_audio_s, [player.stall_s for player in players]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rate", type=float)
    parser.add_argument("seed", type=int)
    parser.add_argument("folders", type=Path, nargs="+")
    asked = parser.parse_args()
    run = list(one_after_another([answers(folder, asked.rate, asked.seed) for folder in asked.folders]))
    print(f"{len(run)} answers\nlongest delay | no gap, within 50 ms, longest | first audio p50 p95 p99")
    for most_s in MOST_S:
        first, under = map(np.array, replayed(run, most_s))
        p50, p95, p99 = np.quantile(first, (0.5, 0.95, 0.99))
        shares = f"{100 * (under < 1e-3).mean():5.1f} {100 * (under <= 0.05).mean():5.1f} % {under.max():.3f} s"
        print(f"{most_s:13.2f} | {shares} | {p50:.3f} {p95:.3f} {p99:.3f} s")


if __name__ == "__main__":
    main()
