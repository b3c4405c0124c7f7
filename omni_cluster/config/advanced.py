"""The two places of a configuration's keys: those that most files set, and the rest, under `advanced`.

A file has `advanced` at its top and in each stage, with the sections of the keys around it: `limits.max_choices` is
`advanced.limits.max_choices`. The schema has one place for all of them, so a file's are moved there first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ADVANCED: Final = "advanced"
ADVANCED_OPTIONS: Final = "advanced_options"
"""Where a stage keeps what its `advanced.options` say: only the family knows which of its options are advanced."""
PUBLIC: Final[dict[str, Any]] = {"public": True}
"""What the field of a public key has as `json_schema_extra`."""


class MisplacedKey(Exception):
    """A key that stands where it may not: its path, its value, and what to do."""

    def __init__(self, key: str, value: object, fix: str) -> None:
        super().__init__(key, value, fix)
        self.key, self.value, self.fix = key, value, fix


@dataclass
class Places:
    """Where a file has what the schema has elsewhere, by dotted paths."""

    moved: dict[str, str] = field(default_factory=dict)
    """From the schema's path to the file's."""
    old: dict[str, str] = field(default_factory=dict)
    """Advanced keys that the file has outside `advanced`, with the place that they have now."""

    def in_file(self, path: str) -> str:
        """The file's path of what the schema has at `path`."""
        return next((given + path[len(moved) :] for moved, given in self.moved.items() if _holds(moved, path)), path)


def is_public(info: FieldInfo) -> bool:
    return isinstance(info.json_schema_extra, dict) and bool(info.json_schema_extra.get("public"))


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    """The model of a key that has keys of its own; a list of such is none."""
    return next(
        (
            each
            for each in (info.annotation, *get_args(info.annotation))
            if isinstance(each, type) and issubclass(each, BaseModel)
        ),
        None,
    )


def move_advanced(given: Mapping[Any, Any], model: type[BaseModel], stage: type[BaseModel]) -> tuple[Any, Places]:
    """What a file says, with each key at the schema's place. `given` is not changed; what is no mapping stays.

    Raises MisplacedKey for a public key under `advanced`, and for a key at both places.
    """
    places = Places()
    moved = _one_level(given, model, "", places)
    if isinstance(stages := moved.get("stages"), list):
        moved["stages"] = [
            _one_stage(each, stage, f"stages[{number}].", places) if isinstance(each, Mapping) else each
            for number, each in enumerate(stages)
        ]
    return moved, places


def split(given: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """What the schema's places hold as a file has it: the other way round, for one level."""
    plain, advanced = _split(given, model)
    if options := plain.pop(ADVANCED_OPTIONS, None):
        advanced["options"] = options
    return {**plain, ADVANCED: advanced} if advanced else plain


def _holds(outer: str, path: str) -> bool:
    return path.startswith(outer) and path[len(outer) :][:1] in ("", ".", "[")


def _one_stage(given: Mapping[Any, Any], model: type[BaseModel], at: str, places: Places) -> dict[Any, Any]:
    advanced = given.get(ADVANCED)
    if not isinstance(advanced, Mapping) or "options" not in advanced:
        return _one_level(given, model, at, places)
    others = {key: value for key, value in advanced.items() if key != "options"}
    moved = _one_level({**given, ADVANCED: others}, model, at, places)
    places.moved[at + ADVANCED_OPTIONS] = f"{at}{ADVANCED}.options"
    return {**moved, ADVANCED_OPTIONS: advanced["options"]}


def _one_level(given: Mapping[Any, Any], model: type[BaseModel], at: str, places: Places) -> dict[Any, Any]:
    """`at`: the path of what has `advanced`, with a dot behind."""
    plain = {key: value for key, value in given.items() if key != ADVANCED}
    for path in _misplaced(plain, model):
        places.old[at + path] = f"{at}{ADVANCED}.{path}"
    advanced = given.get(ADVANCED, {})
    if not isinstance(advanced, Mapping):
        raise MisplacedKey(at + ADVANCED, advanced, "it must be a mapping of the keys that are no public ones")
    _merge(plain, advanced, model, (at, ""), places)
    return plain


def _misplaced(given: Mapping[Any, Any], model: type[BaseModel]) -> Iterator[str]:
    for key, value in given.items():
        info = model.model_fields.get(key)
        if info is None or is_public(info):
            continue
        section = section_of(info)
        if section is not None and isinstance(value, Mapping):
            yield from (f"{key}.{path}" for path in _misplaced(value, section))
        else:
            yield str(key)


def _merge(
    plain: MutableMapping[Any, Any],
    advanced: Mapping[Any, Any],
    model: type[BaseModel],
    where: tuple[str, str],
    places: Places,
) -> None:
    """`where`: the path of what has `advanced`, and from there to these keys."""
    at, inner = where
    for key, value in advanced.items():
        info = model.model_fields.get(key)
        section = section_of(info) if info is not None else None
        path, written = f"{at}{inner}{key}", f"{at}{ADVANCED}.{inner}{key}"
        if section is not None and isinstance(value, Mapping) and isinstance(plain.get(key, {}), Mapping):
            plain[key] = dict(plain.get(key, {}))
            _merge(plain[key], value, section, (at, f"{inner}{key}."), places)
        elif info is not None and is_public(info):
            raise MisplacedKey(written, value, f"it is a public key, set {path} instead")
        elif key in plain:
            raise MisplacedKey(written, value, f"{path} is set too, keep one of the two, for example {written}")
        else:
            plain[key] = value
            places.moved[path] = written


def _split(given: Mapping[str, Any], model: type[BaseModel]) -> tuple[dict[str, Any], dict[str, Any]]:
    plain: dict[str, Any] = {}
    advanced: dict[str, Any] = {}
    for key, value in given.items():
        info = model.model_fields[key]
        section = section_of(info)
        if section is not None and isinstance(value, Mapping):
            inner_plain, inner_advanced = _split(value, section)
            plain |= {key: inner_plain} if inner_plain else {}
            advanced |= {key: inner_advanced} if inner_advanced else {}
        elif is_public(info) or key == ADVANCED_OPTIONS:
            plain[key] = value
        else:
            advanced[key] = value
    return plain, advanced
