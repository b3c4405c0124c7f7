"""Code2wav under open-loop arrivals, simulated: which way of forming batches leaves how many streams without a gap.

    python benchmarks/code2wav_simulation.py [--rates 3 5 7 9] [--seconds 120] [--seed 0] [--json OUT.json]

Costs are those that docs/performance.md has of one H200 with 7B dimensions; the pieces are cut by the product's own
rule, and the policy `steps` is the product's own scheduler. Nothing is run: a minute of load takes seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from omni_cluster.engine.step_cost import StepCost
from omni_cluster.engine.step_scheduler import StepScheduler
from omni_cluster.models.qwen2_5_omni.code2wav import piece_range

CODES, TEXT_TOKENS = 512, 64
BLOCK = 12
BLOCK_S = 0.24
STEPS = 9
STEP_S, STEP_BLOCK_S = 2.9e-3, 0.14e-3
"""A Runge-Kutta step of the flow alone on the card, and of each of its blocks: 2 blocks 3.2 ms, 128 blocks 20.9 ms."""
VOCODER_S, VOCODER_FRAME_S = 2.0e-3, 11e-6
VOCODER_CONTEXT, BLOCK_FRAMES = 48, 24
LAUNCH_CONTENTION, WORK_CONTENTION = 3.5, 1.3
"""How much longer a step and its blocks take while thinker and talker are at work: fitted to the product's runs."""
FIRST_CODE_S, FIRST_CODE_MORE_S = 0.053, 0.0075
TOKEN_S, TOKEN_MORE_S = 0.0052, 0.00016
CODE_S, CODE_MORE_S = 0.0014, 0.00017
"""Of the talker's first code, of each during the text, of each later; and what every other request adds to it."""
HTTP_S = 0.010
ASK_S = 0.0005
"""Until a stream that was served can ask for more: the next batch has begun by then."""
MAX_PIECE_BLOCKS = 16
BATCH_BLOCKS = 128


@dataclass(slots=True)
class Stream:
    """One answer: its codes as the talker makes them, its pieces, and its client's player."""

    arrival_s: float
    codes: float = 0.0
    start: int = 0
    dry_s: float = math.inf
    first_s: float = math.inf
    stall_s: float = 0.0
    asks_s: float = 0.0

    def blocks_there(self, start: int) -> int:
        """Whole blocks that could be made now, with a look-ahead after them; the rest once all codes are there."""
        if self.codes >= CODES:
            return -(-(CODES - start) // BLOCK)
        return (int(self.codes) - start) // BLOCK - 1

    def next_blocks(self, start: int, number: int) -> int:
        """Heard blocks of a piece; 0 while too few codes are there."""
        least, most = piece_range(number, MAX_PIECE_BLOCKS)
        there = max(0, self.blocks_there(start))
        complete = self.codes >= CODES
        return min(there, most) if there >= least or (complete and there) else 0

    def deliver(self, blocks: int, now_s: float) -> None:
        self.start = min(CODES, self.start + blocks * BLOCK)
        if self.first_s == math.inf:
            self.first_s = self.dry_s = now_s
        if now_s > self.dry_s:
            self.stall_s += now_s - self.dry_s
            self.dry_s = now_s
        self.dry_s += blocks * BLOCK_S

    @property
    def is_done(self) -> bool:
        return self.start >= CODES


@dataclass(slots=True, eq=False)
class Piece:
    """A piece that waits or runs; see `step_scheduler.Job`."""

    stream: Stream
    due_s: float
    heard: int
    start: int
    number: int
    before: Piece | None = None
    steps_left: int = STEPS
    begun: bool = False

    @property
    def blocks(self) -> int:
        is_last = self.start + self.heard * BLOCK >= CODES
        return self.heard + (0 if is_last else 1)

    @property
    def frames(self) -> int:
        return self.blocks * BLOCK_FRAMES

    @property
    def may_advance(self) -> bool:
        """A piece needs, at each step, what the one before it made there."""
        return self.before is None or self.before.steps_left < self.steps_left

    def grow(self) -> None:
        if not self.begun:
            self.heard = max(self.heard, self.stream.next_blocks(self.start, self.number))


class Policy(Protocol):
    """What runs next: pieces, and how many steps of the flow before anything else may enter."""

    def choose(self, pieces: list[Piece], now_s: float) -> tuple[list[Piece], int]: ...

    def finish(self, ended: list[Piece], others: bool, now_s: float) -> list[Piece]: ...


class AtOnce:
    """The vocoder runs as soon as a piece's flow has ended."""

    def finish(self, ended: list[Piece], others: bool, now_s: float) -> list[Piece]:
        return ended


class WholeBatches(AtOnce):
    """What is due first, up to `max_blocks`, all steps at once: the product before."""

    def __init__(self, max_blocks: int = BATCH_BLOCKS) -> None:
        self._max_blocks = max_blocks

    def choose(self, pieces: list[Piece], now_s: float) -> tuple[list[Piece], int]:
        batch: list[Piece] = []
        for piece in sorted(pieces, key=lambda p: p.due_s):
            if batch and sum(p.blocks for p in batch) + piece.blocks > self._max_blocks:
                break
            batch.append(piece)
        return batch, STEPS


class FifoSteps(AtOnce):
    """Jobs join at any step in the order of their arrival, and stay until their end."""

    def __init__(self, max_blocks: int = BATCH_BLOCKS) -> None:
        self._max_blocks = max_blocks

    def choose(self, pieces: list[Piece], now_s: float) -> tuple[list[Piece], int]:
        batch: list[Piece] = []
        for piece in sorted(pieces, key=lambda p: not p.begun):
            if not batch or sum(p.blocks for p in batch) + piece.blocks <= self._max_blocks:
                batch.append(piece)
        return batch, 1


class Steps:
    """The product's scheduler; `ahead`: pieces of a stream that may be begun while the one before them runs."""

    def __init__(self, ahead: int = 0) -> None:
        self.ahead = ahead
        self._now_s = 0.0
        cost = StepCost(STEP_S * LAUNCH_CONTENTION, STEP_BLOCK_S * WORK_CONTENTION / BLOCK_FRAMES)
        self._scheduler: StepScheduler[Piece] = StepScheduler(
            BATCH_BLOCKS * BLOCK_FRAMES, 64, cost, lambda: self._now_s
        )

    def choose(self, pieces: list[Piece], now_s: float) -> tuple[list[Piece], int]:
        self._now_s = now_s
        return self._scheduler.choose([piece for piece in pieces if piece.may_advance]), 1

    def finish(self, ended: list[Piece], others: bool, now_s: float) -> list[Piece]:
        self._now_s = now_s
        return self._scheduler.to_finish(ended, others)


@dataclass(slots=True)
class Outcome:
    streams: list[Stream]
    busy_s: float
    wall_s: float
    step_blocks: list[int] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        done = self.streams
        first = sorted(s.first_s - s.arrival_s for s in done)
        stall = sorted(s.stall_s for s in done)
        return {
            "without_gap": sum(s < 1e-3 for s in stall) / len(stall),
            **{f"stall_p{p}_s": quantile(stall, p) for p in (50, 95, 99)},
            **{f"first_audio_p{p}_s": quantile(first, p) for p in (50, 95, 99)},
            "utilisation": self.busy_s / self.wall_s,
            "blocks_a_step": statistics.mean(self.step_blocks),
        }


def quantile(ordered: Sequence[float], percent: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


class Card:
    """Thinker and talker of all streams, and code2wav by one policy."""

    def __init__(self, policy: Policy, rate_per_s: float, seconds: float, seed: int) -> None:
        gaps = random.Random(seed)
        arrivals = itertools.accumulate(gaps.expovariate(rate_per_s) for _ in itertools.count())
        self._arrivals = list(itertools.takewhile(lambda at_s: at_s < seconds, arrivals))
        self._policy = policy
        self._now_s = 0.0
        self._speaking: list[Stream] = []
        self._open: dict[int, Stream] = {}
        self._pieces: list[Piece] = []
        self._last: dict[int, Piece] = {}
        self._all: list[Stream] = []
        self._step_blocks: list[int] = []
        self._busy_s = 0.0

    def run(self) -> Outcome:
        while self._arrivals or self._open or self._speaking:
            self._ask()
            pieces = [piece for piece in self._pieces if piece.steps_left]
            if not self._pieces:
                self._pass(1e-3)
                continue
            for piece in pieces:
                piece.grow()
            if pieces:
                batch, steps = self._policy.choose(pieces, self._now_s)
                self._make(batch, steps)
            self._finish()
        return Outcome(self._all, self._busy_s, self._now_s, self._step_blocks)

    def _make(self, batch: list[Piece], steps: int) -> None:
        blocks = sum(piece.blocks for piece in batch)
        self._step_blocks.append(blocks)
        for piece in batch:
            piece.begun = True
        self._work(steps * STEP_S, steps * STEP_BLOCK_S * blocks)
        for piece in batch:
            piece.steps_left -= steps

    def _finish(self) -> None:
        ended = [p for p in self._pieces if p.steps_left == 0 and (p.before is None or p.before not in self._pieces)]
        made = self._policy.finish(ended, any(piece.steps_left for piece in self._pieces), self._now_s)
        by_size = Counter(1 << (piece.heard - 1).bit_length() for piece in made)
        if made:
            frames = sum(count * (size * BLOCK_FRAMES + VOCODER_CONTEXT) for size, count in by_size.items())
            self._work(VOCODER_S * len(by_size), VOCODER_FRAME_S * frames)
        for piece in made:
            piece.stream.deliver(piece.heard, self._now_s + HTTP_S)
            piece.stream.asks_s = self._now_s + ASK_S
            self._pieces.remove(piece)
            if piece.stream.is_done:
                del self._open[id(piece.stream)], self._last[id(piece.stream)]

    def _work(self, launch_s: float, work_s: float) -> None:
        taken_s = launch_s + work_s
        if self._speaking:
            taken_s = LAUNCH_CONTENTION * launch_s + WORK_CONTENTION * work_s
        self._busy_s += taken_s
        self._pass(taken_s)

    def _ask(self) -> None:
        ahead = getattr(self._policy, "ahead", 0)
        for key, stream in self._open.items():
            last = self._last.get(key)
            start, number = (0, 0) if last is None else (last.start + last.heard * BLOCK, last.number + 1)
            mine = [piece for piece in self._pieces if piece.stream is stream]
            if len(mine) > ahead or (last and not last.begun) or stream.asks_s > self._now_s or start >= CODES:
                continue
            if blocks := stream.next_blocks(start, number):
                due_s = self._now_s if stream.dry_s == math.inf else stream.dry_s
                due_s += sum(piece.heard for piece in mine) * BLOCK_S
                piece = Piece(stream, due_s, blocks, start, number, mine[-1] if mine else None)
                self._pieces.append(piece)
                self._last[key] = piece

    def _pass(self, seconds: float) -> None:
        """Arrivals and codes of so many seconds, in steps of two milliseconds at most."""
        until_s = self._now_s + seconds
        while self._now_s < until_s:
            step_s = min(2e-3, until_s - self._now_s)
            self._now_s = until_s if step_s < 2e-3 else self._now_s + step_s
            while self._arrivals and self._arrivals[0] <= self._now_s:
                stream = Stream(self._arrivals.pop(0))
                self._all.append(stream)
                self._speaking.append(stream)
                self._open[id(stream)] = stream
            self._speak(step_s)

    def _speak(self, step_s: float) -> None:
        """During the text a code comes with each token of the thinker, then at the talker's own pace."""
        others = len(self._speaking) - 1
        code_s, token_s = CODE_S + CODE_MORE_S * others, TOKEN_S + TOKEN_MORE_S * others
        first_s = FIRST_CODE_S + FIRST_CODE_MORE_S * min(others, 16)
        for stream in self._speaking:
            if self._now_s - stream.arrival_s > first_s:
                stream.codes += step_s / max(token_s, code_s) if stream.codes < TEXT_TOKENS else step_s / code_s
        self._speaking = [s for s in self._speaking if s.codes < CODES]


POLICIES: dict[str, Callable[[], Policy]] = {
    "batches of 128 blocks": WholeBatches,
    "batches of 32 blocks": lambda: WholeBatches(32),
    "batches of 16 blocks": lambda: WholeBatches(16),
    "steps, in order of arrival": FifoSteps,
    "steps, by slack": Steps,
    "steps, by slack, one ahead": lambda: Steps(1),
    "steps, by slack, two ahead": lambda: Steps(2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[3, 5, 7, 9])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies", nargs="*")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'policy':28} rate  no gap | stall p50  p95  p99 | first audio p50  p95  p99 | busy | blocks")
    for (name, policy), rate in itertools.product(POLICIES.items(), options.rates):
        if options.policies and not any(p in name for p in options.policies):
            continue
        f = Card(policy(), rate, options.seconds, options.seed).run().figures()
        rows.append({"policy": name, "rate_per_s": rate, **f})
        print(
            f"{name:28} {rate:3g}  {100 * f['without_gap']:5.1f}% | {f['stall_p50_s']:8.3f} {f['stall_p95_s']:5.3f} "
            f"{f['stall_p99_s']:5.3f} | {f['first_audio_p50_s']:12.3f} {f['first_audio_p95_s']:5.3f} "
            f"{f['first_audio_p99_s']:5.3f} | {f['utilisation']:4.2f} | {f['blocks_a_step']:4.0f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
