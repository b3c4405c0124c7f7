"""The highest rate of requests at which streams have no gap: which rate is tried next, and what was found."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_CELLS = 16
DIGITS = 4
"""Of a rate that is tried; finer than any precision that may be asked for."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A cell of the search. `share` of its requests were streams without a gap."""

    rate_per_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Search:
    """Where the rate is looked for, and how exactly.

    A rate passes with `share` of its streams without a gap. Rates are doubled from the lowest of `between_per_s` until
    one fails; then the rate between the highest that passed and the lowest that failed is tried, until they are
    `precision` apart or `max_cells` were run.
    """

    share: float = 0.99
    between_per_s: tuple[float, float] = (0.25, 64.0)
    precision: float = 0.1
    max_cells: int = MAX_CELLS

    def next_rate_per_s(self, tried: Sequence[Tried]) -> float | None:
        """None when the search is over."""
        found = self.found(tried)
        lowest, highest = self.between_per_s
        if len(tried) >= self.max_cells or found.is_exact:
            return None
        if found.passed_per_s is None:
            return lowest if found.failed_per_s is None else None
        if found.failed_per_s is None:
            return min(2 * found.passed_per_s, highest) if found.passed_per_s < highest else None
        return _rounded(math.sqrt(found.passed_per_s * found.failed_per_s))

    def found(self, tried: Iterable[Tried]) -> Capacity:
        tried = list(tried)
        passed = [cell.rate_per_s for cell in tried if cell.share >= self.share]
        failed = [cell.rate_per_s for cell in tried if cell.share < self.share]
        return Capacity(self, len(tried), max(passed, default=None), min(failed, default=None))


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a search found: the highest rate that passed and the lowest that failed; None where there was none."""

    search: Search
    cells: int
    passed_per_s: float | None
    failed_per_s: float | None

    @property
    def is_exact(self) -> bool:
        """Whether what passed and what failed are as close as was asked for."""
        if self.passed_per_s is None or self.failed_per_s is None:
            return False
        return self.failed_per_s <= self.passed_per_s * (1 + self.search.precision)

    def __str__(self) -> str:
        kept = f"{100 * self.search.share:g} % of the streams without a gap"
        if self.passed_per_s is None:
            return f"capacity: below {self.failed_per_s:g}/s, the lowest rate tried, which had not {kept}"
        if self.failed_per_s is None:
            return f"capacity: {self.passed_per_s:g}/s or more: the highest rate tried still had {kept}"
        found = f"capacity: {self.passed_per_s:g}/s with {kept}; {self.failed_per_s:g}/s failed"
        precision = f"{100 * self.search.precision:g} %"
        return found if self.is_exact else f"{found}; {self.cells} cells were too few for a precision of {precision}"


def _rounded(rate: float) -> float:
    return float(f"{rate:.{DIGITS}g}")
