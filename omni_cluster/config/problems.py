"""The message of a broken rule of a configuration, and the base of the models that raise it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

PROBLEM_TYPE = "stage_config"
REMOVED: Mapping[str, str] = MappingProxyType(
    {
        "handover.rows": "leave it out, hidden states are always Ray objects now",
        "limits.max_stall_s": "leave it out, max_ongoing_requests bounds what runs",
        "stages.autoscaling.target": "set signals instead, for example signals: {max_requests: 24}",
        "stages.diffusion": "rename it to options",
        "stages.card_percent": "leave it out, a stage may use its whole card",
    }
)
"""What to do with keys that once were, by their path without numbers."""


class Missing:
    """The value of a key that was not given."""

    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()


@dataclass(frozen=True)
class Problem:
    """A broken rule: the dotted key, relative to the model that found it, its value, and what would do."""

    key: str
    value: object
    fix: str


def refuse(problems: Sequence[Problem]) -> None:
    """Raise the first of `problems`, if any, as a pydantic error that carries it and the number of further ones."""
    if not problems:
        return
    first = problems[0]
    context = {"key": first.key, "value": first.value, "fix": first.fix, "further": len(problems) - 1}
    raise PydanticCustomError(PROBLEM_TYPE, "{key}: {fix}", context)


def nearest(word: str, known: Collection[str]) -> str:
    """`did you mean x` for the known name closest to `word`, or the list of all when none is close."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}" if close else f"use one of {', '.join(known)}"


class Strict(BaseModel):
    """A model that takes no other keys, no other types, and does not change."""

    gone: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Keys that a family's options once had, and what to do with them."""

    # strict: a YAML "2" or true where a number belongs is a slip of the pen, not a number.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())
