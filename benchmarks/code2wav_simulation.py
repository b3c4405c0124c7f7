"""Code2wav under load, simulated: which way of forming batches leaves how many streams without a gap.

    python benchmarks/code2wav_simulation.py [--open RATE REQUESTS]... [--closed CLIENTS REQUESTS]...
        [--burst REQUESTS]... [--policies NAME...] [--seed 0] [--json OUT.json]

Costs alone are those of one H200 with 7B dimensions (benchmarks/notes/2026-11-21-budget.md), and what the stages cost
each other is fitted to the product's runs there (`CELLS`, which are simulated if no load is given). The pieces are cut
by the product's own rule, `steps` is the product's own scheduler, arrivals are those of `omni-cluster bench`. Nothing
is run: a minute of load takes seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from omni_cluster.bench.load import poisson_arrivals
from omni_cluster.engine.sound.scheduler import StepCost, StepScheduler
from omni_cluster.models.qwen2_5_omni.code2wav import piece_range
from omni_cluster.models.qwen2_5_omni.stages import Code2Wav
from omni_cluster.models.sound import StepTime

PRIORS = Code2Wav.priors
CODES, TEXT_TOKENS = 512, 64
BLOCK = 12
BLOCK_S = 0.24
STEPS = 9
STEP_S, STEP_BLOCK_S = 2.9e-3, 0.14e-3
"""A Runge-Kutta step of the flow alone on the card, and of each of its blocks: 2 blocks 3.2 ms, 128 blocks 20.9 ms."""
VOCODER_S, VOCODER_FRAME_S = 2.3e-3, 11.3e-6
VOCODER_CONTEXT, BLOCK_FRAMES = 48, 24
HTTP_S = 0.010
ASK_S = 0.0005
"""Until a stream that was served can ask for more: the next batch has begun by then."""


@dataclass(frozen=True)
class Contention:
    """What the stages cost each other on one card: fitted to the product's runs."""

    launch_by_talker: float = 2.5
    work_by_thinker: float = 0.4
    work_by_talker: float = 0.4
    """How much longer a step's fixed part, and all of code2wav's work, take while the thinker, or a talker past its
    text, is at work."""
    token_by_code2wav: float = 1.65
    code_by_code2wav: float = 1.5
    code_by_thinker: float = 1.9

    def token_s(self, texts: int, code2wav: bool) -> float:
        return (5.16e-3 + 0.08e-3 * texts) * (self.token_by_code2wav if code2wav else 1)

    def code_s(self, streams: int, thinker: bool, code2wav: bool) -> float:
        alone_s = 1.3e-3 + 0.043e-3 * streams
        return alone_s * (self.code_by_thinker if thinker else 1) * (self.code_by_code2wav if code2wav else 1)

    def first_code_s(self, streams: int, beginning: int, code2wav: bool) -> float:
        return 0.062 + 0.0024 * streams + 0.014 * beginning + (0.04 if code2wav else 0)

    def launch_s(self, alone_s: float, talker: bool) -> float:
        return alone_s * (1 + self.launch_by_talker * talker)

    def work_s(self, alone_s: float, thinker: bool, talker: bool) -> float:
        return alone_s * (1 + self.work_by_thinker * thinker + self.work_by_talker * talker)


MAX_PIECE_BLOCKS = 16
BATCH_BLOCKS = 128
MAX_STREAMS = 64
CAPTURED_FRAMES = 1_280
PERCENTS = (50, 90, 95, 99)


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
    end_s: float = math.inf
    first_code_s: float = math.inf
    said_s: float = math.inf
    pieces: int = 0

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
        self.pieces += 1
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
    def size(self) -> int:
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

    def took(self, time: StepTime) -> None: ...


class AtOnce:
    """The vocoder runs as soon as a piece's flow has ended."""

    def finish(self, ended: list[Piece], others: bool, now_s: float) -> list[Piece]:
        return ended

    def took(self, time: StepTime) -> None:
        """Nothing is learned."""


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

    def __init__(self, ahead: int = 0, scheduler: type[StepScheduler] = StepScheduler) -> None:
        self.ahead = ahead
        self._now_s = 0.0
        self._scheduler = scheduler(
            BATCH_BLOCKS * BLOCK_FRAMES, 64, PRIORS, StepCost(PRIORS.step, PRIORS.usual_sizes), lambda: self._now_s
        )

    def choose(self, pieces: list[Piece], now_s: float) -> tuple[list[Piece], int]:
        self._now_s = now_s
        return self._scheduler.choose([piece for piece in pieces if piece.may_advance]), 1

    def finish(self, ended: list[Piece], others: bool, now_s: float) -> list[Piece]:
        self._now_s = now_s
        return self._scheduler.to_finish(ended, others)

    def took(self, time: StepTime) -> None:
        self._scheduler.took(time)


@dataclass(frozen=True)
class Load:
    """Requests: when they are sent, and how many are sent one by one as others end."""

    name: str
    arrivals_s: tuple[float, ...]
    then: int = 0

    @classmethod
    def open(cls, rate_per_s: float, requests: int, seed: int) -> Load:
        return cls(f"open {rate_per_s:g}/s", poisson_arrivals(rate_per_s, requests, seed))

    @classmethod
    def closed(cls, clients: int, requests: int) -> Load:
        return cls(f"closed {clients}", (0.0,) * clients, requests - clients)

    @classmethod
    def burst(cls, requests: int) -> Load:
        return cls(f"burst {requests}", (0.0,) * requests)


@dataclass(slots=True)
class Outcome:
    streams: list[Stream]
    wall_s: float
    card_s: Counter[str]
    step_blocks: list[int]
    passes: int

    def figures(self) -> dict[str, float]:
        done = self.streams
        first = sorted(s.first_s - s.arrival_s for s in done)
        stall = sorted(s.stall_s for s in done)
        whole = sorted(s.end_s - s.arrival_s for s in done)
        return {
            "requests_per_s": len(done) / self.wall_s,
            "without_gap": sum(s < 1e-3 for s in stall) / len(stall),
            **{f"stall_p{p}_s": quantile(stall, p) for p in PERCENTS},
            **{f"first_audio_p{p}_s": quantile(first, p) for p in PERCENTS},
            **{f"whole_p{p}_s": quantile(whole, p) for p in PERCENTS},
            "talker_p50_s": statistics.median(s.said_s - s.arrival_s for s in done),
            **{f"{part}_s_a_request": taken_s / len(done) for part, taken_s in sorted(self.card_s.items())},
            "busy": sum(taken_s for part, taken_s in self.card_s.items() if "alone" not in part) / self.wall_s,
            "blocks_a_step": statistics.mean(self.step_blocks),
            "blocks_a_request": sum(self.step_blocks) / STEPS / len(done),
            "steps": len(self.step_blocks),
            "passes": self.passes,
            "pieces": sum(s.pieces for s in done) / len(done),
        }


def quantile(ordered: Sequence[float], percent: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def captured(blocks: int) -> int:
    """Blocks of the smallest captured step that holds so many: `flow.graph_sizes`."""
    if blocks <= 4:
        return max(2, blocks)
    part = max(2, 1 << ((blocks - 1).bit_length() - 3))
    return -(-blocks // part) * part


def vocoded_frames(blocks: int, pieces: int) -> int:
    """Frames of one pass, with those that fill a captured one: `vocoding.graph_sizes`."""
    frames, filled = blocks * BLOCK_FRAMES + VOCODER_CONTEXT, 1 << (pieces - 1).bit_length()
    return frames * (filled if frames * filled <= CAPTURED_FRAMES else pieces)


class Card:
    """Thinker and talker of all streams, and code2wav by one policy."""

    def __init__(self, policy: Policy, load: Load, contention: Contention) -> None:
        self._arrivals, self._then = list(load.arrivals_s), load.then
        self._policy, self._contention = policy, contention
        self._now_s = 0.0
        self._speaking: list[Stream] = []
        self._open: dict[int, Stream] = {}
        self._pieces: list[Piece] = []
        self._last: dict[int, Piece] = {}
        self._outcome = Outcome([], 0.0, Counter(), [], 0)
        self._thinks = self._talks = False

    def run(self) -> Outcome:
        while self._arrivals or self._open:
            self._ask()
            if not self._pieces:
                self._pass(1e-3, code2wav=False)
                continue
            pieces = [piece for piece in self._pieces if piece.steps_left]
            for piece in pieces:
                piece.grow()
            if pieces:
                self._make(*self._policy.choose(pieces, self._now_s))
            self._finish()
        self._outcome.wall_s = max(stream.end_s for stream in self._outcome.streams)
        return self._outcome

    def _make(self, batch: list[Piece], steps: int) -> None:
        blocks = sum(piece.blocks for piece in batch)
        for piece in batch:
            piece.begun = True
        for _ in range(steps):
            self._outcome.step_blocks.append(blocks)
            taken_s = self._work("flow", STEP_S, STEP_BLOCK_S * captured(blocks))
            self._policy.took(StepTime(blocks * BLOCK_FRAMES, taken_s))
        for piece in batch:
            piece.steps_left -= steps

    def _finish(self) -> None:
        ended = [p for p in self._pieces if p.steps_left == 0 and (p.before is None or p.before not in self._pieces)]
        made = self._policy.finish(ended, any(piece.steps_left for piece in self._pieces), self._now_s)
        by_size = Counter(1 << (piece.heard - 1).bit_length() for piece in made)
        if made:
            frames = sum(vocoded_frames(size, count) for size, count in by_size.items())
            self._outcome.passes += 1
            self._work("vocoder", VOCODER_S * len(by_size), VOCODER_FRAME_S * frames)
        for piece in made:
            self._deliver(piece)

    def _deliver(self, piece: Piece) -> None:
        stream = piece.stream
        stream.deliver(piece.heard, self._now_s + HTTP_S)
        stream.asks_s = self._now_s + ASK_S
        self._pieces.remove(piece)
        if stream.is_done:
            stream.end_s = self._now_s + HTTP_S
            del self._open[id(stream)], self._last[id(stream)]
            if self._then:
                self._then -= 1
                self._arrivals.append(stream.end_s)

    def _work(self, part: str, launch_s: float, work_s: float) -> float:
        """Of the card; gives how long it took beside the other stages."""
        fixed_s = self._contention.launch_s(launch_s, self._talks) if part == "flow" else launch_s
        taken_s = fixed_s + self._contention.work_s(work_s, self._thinks, self._talks)
        self._outcome.card_s[f"{part}_fixed"] += fixed_s
        self._outcome.card_s[f"{part}_work"] += taken_s - fixed_s
        self._outcome.card_s[f"{part}_alone"] += launch_s + work_s
        self._pass(taken_s, code2wav=True)
        return taken_s

    def _ask(self) -> None:
        ahead = getattr(self._policy, "ahead", 0)
        for key, stream in self._open.items():
            last = self._last.get(key)
            start, number = (0, 0) if last is None else (last.start + last.heard * BLOCK, last.number + 1)
            has_no_room = last is None and len(self._last) >= MAX_STREAMS
            if has_no_room or (last and not last.begun) or stream.asks_s > self._now_s or start >= CODES:
                continue
            mine = [piece for piece in self._pieces if piece.stream is stream]
            if len(mine) > ahead:
                continue
            if blocks := stream.next_blocks(start, number):
                due_s = self._now_s if stream.dry_s == math.inf else stream.dry_s
                due_s += sum(piece.heard for piece in mine) * BLOCK_S
                piece = Piece(stream, due_s, blocks, start, number, mine[-1] if mine else None)
                self._pieces.append(piece)
                self._last[key] = piece

    def _pass(self, seconds: float, code2wav: bool) -> None:
        """Arrivals and codes of so many seconds, in steps of four milliseconds at most."""
        until_s = self._now_s + seconds
        while self._now_s < until_s:
            step_s = min(4e-3, until_s - self._now_s)
            self._now_s = until_s if step_s < 4e-3 else self._now_s + step_s
            while self._arrivals and self._arrivals[0] <= self._now_s:
                self._enter(Stream(self._arrivals.pop(0)), code2wav)
            self._speak(step_s, code2wav)

    def _enter(self, stream: Stream, code2wav: bool) -> None:
        beginning = sum(other.first_code_s > self._now_s for other in self._speaking)
        first_s = self._contention.first_code_s(len(self._at_work()), beginning, code2wav)
        stream.first_code_s = stream.arrival_s + first_s
        self._outcome.streams.append(stream)
        self._speaking.append(stream)
        self._open[id(stream)] = stream

    def _at_work(self) -> list[Stream]:
        """Streams whose codes are made now, of those that have not all of them."""
        return self._speaking

    def _speak(self, step_s: float, code2wav: bool) -> None:
        """During the text a code comes with each token of the thinker, then at the talker's own pace."""
        at_work = self._at_work()
        texts = sum(stream.codes < TEXT_TOKENS for stream in at_work)
        self._thinks, self._talks = texts > 0, texts < len(at_work)
        code_s = self._contention.code_s(len(at_work), self._thinks, code2wav)
        in_text_s = max(code_s, self._contention.token_s(texts, code2wav))
        for stream in at_work:
            if self._now_s > stream.first_code_s:
                stream.codes += step_s / (in_text_s if stream.codes < TEXT_TOKENS else code_s)
            if stream.codes >= CODES:
                stream.said_s = self._now_s
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


CELLS = (
    Load.open(3, 120, 0),
    Load.open(5, 200, 0),
    Load.open(7, 210, 0),
    Load.closed(32, 160),
    Load.closed(64, 320),
    Load.burst(16),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--open", type=float, nargs=2, action="append", default=[])
    parser.add_argument("--closed", type=int, nargs=2, action="append", default=[])
    parser.add_argument("--burst", type=int, action="append", default=[])
    parser.add_argument("--policies", nargs="*", help="parts of their names")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    loads = [Load.open(rate, int(requests), options.seed) for rate, requests in options.open]
    loads += [Load.closed(*of) for of in options.closed] + [Load.burst(of) for of in options.burst]
    policies = {n: p for n, p in POLICIES.items() if not options.policies or any(o in n for o in options.policies)}
    rows = []
    print(f"{'policy':28} {'load':12} req/s no gap | stall p50 p90 p99 | first audio p50 p90 p99 | whole p50 | busy")
    for (name, policy), load in itertools.product(policies.items(), loads or CELLS):
        f = Card(policy(), load, Contention()).run().figures()
        rows.append({"policy": name, "load": load.name, **f})
        print(_line(name, load, f), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def _line(policy: str, load: Load, f: dict[str, float]) -> str:
    stall, first = (" ".join(f"{f[f'{of}_p{p}_s']:.3f}" for p in (50, 90, 99)) for of in ("stall", "first_audio"))
    begin = f"{policy:28} {load.name:12} {f['requests_per_s']:5.2f} {100 * f['without_gap']:5.1f}%"
    return f"{begin} | {stall} | {first} | {f['whole_p50_s']:.2f} | {f['busy']:.2f}"


if __name__ == "__main__":
    main()
