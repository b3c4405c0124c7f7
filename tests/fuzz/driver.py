"""Runs inputs by number, in processes of their own: one that ends or hangs is told by the input that it was at."""

from __future__ import annotations

import multiprocessing
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

HANGS_AFTER_S = 120.0
MOST_MB = 1536
"""What an ingress may take; the process that runs them has all of its libraries."""
MOST_BLOCKED_S = 0.5
"""Of a core for one input, wherever that is taken: no ingress stands still for longer."""
_MOST_TOLD = 20


@dataclass(frozen=True)
class Kind:
    """`weight`: how many of all inputs are of this kind; what costs more is rarer."""

    make: Callable[[Random], bytes]
    take: Callable[[bytes], None]
    refusals: tuple[type[Exception], ...]
    weight: int


@dataclass(frozen=True)
class Plan:
    """Which inputs: those of a seed and some kinds, and the module that has them."""

    seed: int
    kinds: Sequence[str]
    table: str = "tests.fuzz.kinds"

    def drawn(self, index: int) -> tuple[str, Kind, Random]:
        """An input's kind, and the random source that makes it."""
        table = import_module(self.table).KINDS
        rng = Random(f"{self.seed}/{index}")
        name = rng.choices(self.kinds, [table[kind].weight for kind in self.kinds])[0]
        return name, table[name], rng

    def input(self, index: int) -> bytes:
        _, kind, rng = self.drawn(index)
        return kind.make(rng)

    def named(self, index: int) -> str:
        return f"input {index} of seed {self.seed} ({self.drawn(index)[0]})"


@dataclass
class Findings:
    """What came of a run. `crashes`: an input's name and what it did."""

    taken: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    slowest_s: dict[str, tuple[float, int]] = field(default_factory=dict)
    crashes: list[str] = field(default_factory=list)
    peak_mb: int = 0

    @property
    def count(self) -> int:
        return self.taken.total() + self.refused.total() + len(self.crashes)

    @property
    def is_within_bounds(self) -> bool:
        """Of memory, and of time for each input."""
        return self.peak_mb < MOST_MB and all(slow_s < MOST_BLOCKED_S for slow_s, _ in self.slowest_s.values())

    def add(self, other: Findings) -> None:
        self.taken += other.taken
        self.refused += other.refused
        for kind, slow in other.slowest_s.items():
            self.slowest_s[kind] = max(slow, self.slowest_s.get(kind, slow))
        self.crashes += other.crashes
        self.peak_mb = max(self.peak_mb, other.peak_mb)


def fuzz(count: int, plan: Plan, workers: int, told: Callable[[str], None] = print) -> Findings:
    """Inputs 0 to `count`, by as many processes as there are workers."""
    runs = [_Worker(range(first, count, workers), plan) for first in range(workers)]
    findings = Findings()
    try:
        while not all([run.is_done() for run in runs]):
            time.sleep(0.05)
    finally:
        for run in runs:
            run.end()
    for run in runs:
        findings.add(run.findings)
    for crash in findings.crashes[:_MOST_TOLD]:
        told(crash)
    return findings


class _Worker:
    """One process at a time; after one that ended of an input, the next goes on behind it."""

    def __init__(self, indices: range, plan: Plan) -> None:
        self._indices, self._plan = indices, plan
        self._context = multiprocessing.get_context("spawn")
        self._at = self._context.Value("q", -1)
        self._began_s = time.monotonic()
        self._last = -1
        self.findings = Findings()
        self._process: BaseProcess | None = None
        self._start()

    def _start(self) -> None:
        self._results, sender = self._context.Pipe(duplex=False)
        self._at.value, self._began_s = -1, time.monotonic()
        self._process = self._context.Process(
            target=_run_all, args=(self._indices, self._plan, self._at, sender), daemon=True
        )
        self._process.start()
        sender.close()

    def is_done(self) -> bool:
        """Looks after the process, and starts another where one is needed."""
        if self._process is None:
            return True
        if self._results.poll():
            self._take()
        elif not self._process.is_alive():
            self._after(f"ended with {self._process.exitcode}")
        elif self._hangs():
            self._process.kill()
            self._process.join()
            self._after(f"hung for {HANGS_AFTER_S:g} s")
        return self._process is None

    def _take(self) -> None:
        try:
            self.findings.add(self._results.recv())
        except EOFError:
            self._after("ended without a word")
            return
        if self._process is not None:
            self._process.join()
        self._process = None

    def _hangs(self) -> bool:
        if self._at.value != self._last:
            self._last, self._began_s = self._at.value, time.monotonic()
        return time.monotonic() - self._began_s > HANGS_AFTER_S

    def _after(self, what: str) -> None:
        at = self._at.value
        self.findings.crashes.append(f"{self._plan.named(at)}: {what}")
        rest = [index for index in self._indices if index > at]
        self._process = None
        if rest and at >= 0:
            self._indices = range(rest[0], self._indices.stop, self._indices.step)
            self._start()

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()


def _run_all(indices: range, plan: Plan, at: Any, results: Any) -> None:
    findings = Findings()
    for index in indices:
        at.value = index
        run_one(index, plan, findings)
    findings.peak_mb = _peak_mb()
    results.send(findings)


def _peak_mb() -> int:
    """Of this program alone: getrusage would count the one that started it, whose memory a fork shares for a moment."""
    (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(peak) // 1024


def run_one(index: int, plan: Plan, findings: Findings) -> None:
    """Any exception but the kind's refusals is a crash."""
    name, kind, rng = plan.drawn(index)
    data = kind.make(rng)
    began_s = time.process_time()
    try:
        kind.take(data)
        findings.taken[name] += 1
    except kind.refusals:
        findings.refused[name] += 1
    except Exception:
        findings.crashes.append(f"{plan.named(index)}: {traceback.format_exc(limit=-6)}")
    took = (time.process_time() - began_s, index)
    findings.slowest_s[name] = max(took, findings.slowest_s.get(name, took))


def lines(findings: Findings) -> Iterator[str]:
    """What a person reads of a run."""
    for kind in sorted(findings.slowest_s):
        slow_s, index = findings.slowest_s[kind]
        taken, refused = findings.taken[kind], findings.refused[kind]
        yield (
            f"{kind:8} {taken + refused:9,} inputs, {taken:9,} taken, {refused:9,} refused, "
            f"slowest {1000 * slow_s:8.1f} ms of a core (input {index})"
        )
    yield f"{findings.count:,} inputs, {len(findings.crashes)} crashes, peak memory {findings.peak_mb} MB"
