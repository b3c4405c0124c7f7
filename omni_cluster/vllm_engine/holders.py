"""Who holds what: a thing that several hold is let go of by the last of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Holders(Generic[T]):
    """How many hold each thing; `len` is how many things anybody holds."""

    def __init__(self) -> None:
        self._counts: Counter[T] = Counter()

    def __contains__(self, held: T) -> bool:
        return held in self._counts

    def __len__(self) -> int:
        return len(self._counts)

    def hold(self, things: Iterable[T]) -> None:
        self._counts.update(things)

    def let_go(self, things: Iterable[T]) -> list[T]:
        """Returns those without a holder left. All of them must have been held."""
        free = []
        for each in things:
            self._counts[each] -= 1
            if not self._counts[each]:
                del self._counts[each]
                free.append(each)
        return free
