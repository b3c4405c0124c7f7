"""Fields of a body beside those that are read: which change nothing, and what is said of the rest."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

_MOST_CHARS = 60
"""Of a name that is compared with the known ones."""
_ALIKE = 0.75
_FEW = 12
"""An object of at most so many fields has all of them named in the refusal of an unknown one."""


def is_nothing(value: object, kinds: Collection[type] = ()) -> bool:
    """Whether a client says by it that it does not want an option: null, "", [], {}, false and 0.

    `kinds`: types of the field; false is a value of a switch, and 0 one of a number.
    """
    if isinstance(value, bool):
        return not value and bool not in kinds
    if isinstance(value, int | float):
        return value == 0 and not {int, float} & set(kinds)
    return value is None or (isinstance(value, str | list | dict) and not value)


def nothings(kinds: Collection[type] = ()) -> list[Any]:
    """The values that are nothing for a field of these types, for its schema."""
    values: list[Any] = [None, "", [], {}, False, 0]
    return [value for value in values if is_nothing(value, kinds)]


def kinds_of(annotation: object) -> frozenset[type]:
    """Which of bool, int and float a field of that type may hold."""
    if annotation in (bool, int, float):
        return frozenset({annotation})  # type: ignore[arg-type]
    if get_origin(annotation) in (list, dict, tuple):
        return frozenset()
    return frozenset[type]().union(*map(kinds_of, get_args(annotation)))


@dataclass(frozen=True)
class Others:
    """Fields that are known, and not read.

    `ignored`: clients send them as a habit, and they change nothing of an answer. `idle`: values of a field that ask
    for nothing, beside those of `is_nothing`: defaults of other servers mostly. `instead`: what to do in place of
    sending a field.
    """

    ignored: frozenset[str] = frozenset()
    idle: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)

    def asks(self, name: str, value: object) -> bool:
        """Whether a field that is not read wants something that it does not get."""
        return not (name in self.ignored or is_nothing(value) or self.is_idle(name, value))

    def is_idle(self, name: str, value: object) -> bool:
        """Whether it is one of the field's values that ask for nothing."""
        same = (idle for idle in self.idle.get(name, ()) if isinstance(idle, bool) is isinstance(value, bool))
        return any(value == idle for idle in same)

    def wish(self, name: str, known: Collection[str]) -> str:
        """What to do in place of sending the field; `known`: names of those that are read."""
        if name in self.instead:
            return self.instead[name]
        if name in self.idle:
            return f"leave it out or send {' or '.join(map(json.dumps, self.idle[name]))}"
        near = difflib.get_close_matches(name[:_MOST_CHARS].lower(), known, n=1, cutoff=_ALIKE)
        if near:
            return f"use {near[0]}, or leave it out"
        return f"leave it out, or use {', '.join(known)}" if 0 < len(known) <= _FEW else "leave it out"

    def schema(self) -> dict[str, Any]:
        """What OpenAPI says of them."""
        ignored: dict[str, Any] = {name: {"description": "Ignored."} for name in sorted(self.ignored)}
        return ignored | {name: {"enum": [*nothings(), *values]} for name, values in self.idle.items()}
