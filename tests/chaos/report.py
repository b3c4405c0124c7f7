"""What a soak showed: a table to read, and the same as JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tests.chaos.breaker import Break
from tests.chaos.clients import Outcome

_RECOVERED = re.compile(r"recovered from (\w+) in (\d+) ms")


@dataclass(frozen=True, slots=True)
class Leaks:
    """What is left once all clients have gone and all replicas are back: nothing should be."""

    logs: int = 0
    of_engines: dict[str, int] = field(default_factory=dict)
    store_bytes: int = 0
    processes: int = 0
    ingress_growth_bytes: int = 0

    @property
    def any(self) -> bool:
        """Memory of an ingress aside: Python's grows a little with what it has seen."""
        return bool(self.logs or any(self.of_engines.values()) or self.store_bytes > 0 or self.processes)


@dataclass(frozen=True, slots=True)
class Report:
    """`recoveries`: of each request that went on, which stage was lost and after how many ms it said more."""

    seed: int
    seconds: float
    outcomes: Sequence[Outcome]
    breaks: Sequence[Break]
    recoveries: Sequence[tuple[str, int]]
    leaks: Leaks

    def count(self, how: str) -> int:
        return sum(outcome.how == how for outcome in self.outcomes)

    @property
    def is_good(self) -> bool:
        return not (self.count("lost") or self.count("differs") or self.leaks.any)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"figures": self.figures()}

    def figures(self) -> dict[str, Any]:
        stalls_ms = [stall_ms for _, stall_ms in self.recoveries]
        return {
            "requests": len(self.outcomes),
            **{how: self.count(how) for how in ("exact", "left", "refused", "cut", "differs", "lost")},
            "breaks": dict(Counter(f"{each.way}: {each.target}" for each in self.breaks)),
            "recovered": dict(Counter(stage for stage, _ in self.recoveries)),
            "stall of a recovered request, ms": _percentiles(stalls_ms),
            "longest pause of an exact stream, s": _percentiles(
                [each.longest_pause_s for each in self.outcomes if each.how == "exact"]
            ),
            "leaks": asdict(self.leaks),
        }

    def lines(self) -> list[str]:
        figures = [f"{name}: {value}" for name, value in self.figures().items()]
        faults = [f"{each.how}: {each.case}: {each.why}" for each in self.outcomes if each.how in ("differs", "lost")]
        return [f"{self.seconds:.0f} s, seed {self.seed}", *figures, *faults]


def recoveries_in(log: str) -> list[tuple[str, int]]:
    """What the ingresses' lines on requests say."""
    return [(stage, int(stall_ms)) for stage, stall_ms in _RECOVERED.findall(log)]


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {name: round(float(np.percentile(values, q)), 3) for name, q in (("p50", 50), ("p99", 99), ("max", 100))}
