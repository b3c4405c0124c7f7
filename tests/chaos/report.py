"""What a soak showed: a table to read, and the same as JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tests.chaos.breaker import Break
from tests.chaos.clients import WRONG, Outcome
from tests.served.app import STAGES

_ENDED = re.compile(r"request (\S+): \S+ answered \d+ after [\d.]+ s(.*)")
_RECOVERED = re.compile(r"recovered from (\w+(?: and \w+)*) in (\d+) ms")


@dataclass(frozen=True, slots=True)
class Recovery:
    """A request that went on: which stage was lost, and after how many ms it said more."""

    request_id: str
    stage: str
    stall_ms: int


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
    """What was asked, broken and left. `faults`: what else did not come as it should, a sentence each."""

    seed: int
    seconds: float
    outcomes: Sequence[Outcome]
    breaks: Sequence[Break]
    recoveries: Sequence[Recovery]
    leaks: Leaks
    faults: Sequence[str] = ()

    def count(self, how: str) -> int:
        return sum(outcome.how == how for outcome in self.outcomes)

    @property
    def is_good(self) -> bool:
        return not (any(map(self.count, WRONG)) or self.leaks.any or self.faults)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"figures": self.figures()}

    def figures(self) -> dict[str, Any]:
        return {
            "requests": len(self.outcomes),
            **{how: self.count(how) for how in ("exact", "left", "refused", "cut", "differs", "lost")},
            "breaks": dict(Counter(f"{each.way}: {each.target}" for each in self.breaks)),
            "recovered": dict(Counter(each.stage for each in self.recoveries)),
            **{f"stall of a request recovered from {stage}, ms": self._stalls_ms(stage) for stage in STAGES},
            "longest pause of an exact stream, s": _percentiles(
                [each.longest_pause_s for each in self.outcomes if each.how == "exact"]
            ),
            "leaks": asdict(self.leaks),
        }

    def _stalls_ms(self, stage: str) -> dict[str, float]:
        return _percentiles([each.stall_ms for each in self.recoveries if each.stage == stage])

    def lines(self) -> list[str]:
        figures = [f"{name}: {value}" for name, value in self.figures().items()]
        wrong = [self._told(each) for each in self.outcomes if each.how in WRONG]
        return [f"{self.seconds:.0f} s, seed {self.seed}", *figures, *wrong, *self.faults]

    def _told(self, outcome: Outcome) -> str:
        """An answer that differs though nothing of its request was lost has another reason than its recovery."""
        told = f"{outcome.how}: {outcome.case}: {outcome.why}"
        if outcome.how == "lost":
            return told
        stages = [each.stage for each in self.recoveries if each.request_id == outcome.request_id]
        return f"{told} (request {outcome.request_id}, recovered from {', '.join(stages) or 'nothing'})"


def recoveries_in(log: str) -> list[Recovery]:
    """What the ingresses' lines on requests say."""
    return [
        Recovery(request_id, stage, int(stall_ms))
        for request_id, survived in _ENDED.findall(log)
        for stages, stall_ms in _RECOVERED.findall(survived)
        for stage in stages.split(" and ")
    ]


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {name: round(float(np.percentile(values, q)), 3) for name, q in (("p50", 50), ("p99", 99), ("max", 100))}
