"""How errors of a worker's methods come to its caller: vLLM's executor passes on the text alone of those it sees."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from omni_cluster.types.errors import OmniError

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Raised:
    """What a method returns in place of raising the error."""

    error: OmniError


def returns_errors(method: Callable[P, T]) -> Callable[P, T | Raised]:
    """A worker's method that returns OmniErrors as `Raised`."""

    @functools.wraps(method)
    def returned(*args: P.args, **kwargs: P.kwargs) -> T | Raised:
        try:
            return method(*args, **kwargs)
        except OmniError as error:
            return Raised(error)

    return returned


def check_none_raised(given: list[Any]) -> None:
    """Raises the first error among what the ranks returned."""
    for each in given:
        if isinstance(each, Raised):
            raise each.error
