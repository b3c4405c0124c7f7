"""What an answer's text must be: a JSON object, a schema's, a pattern's, one of some choices, or a grammar's.

A grammar is compiled for the model's whole vocabulary, and that takes the longer the larger it is: what a client may
send is bounded here, before anything is started.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from omni_cluster.openai_api.errors import BadRequest, invalid
from omni_cluster.openai_api.wire import Wire, at_most, shown
from omni_cluster.types.errors import GrammarRefused

MAX_BYTES = 65_536
"""Of a schema or grammar as JSON."""
MAX_DEPTH = 32
"""Objects and lists in each other."""
MAX_NODES = 2_000
"""Objects, lists and values of a schema."""
MAX_UNROLLED = 10_000
"""Characters of a pattern whose repetitions are written out."""
MAX_CHOICES = 1_000
STRING_FORMATS = frozenset(
    {
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference"),
        *("uri-template", "json-pointer", "relative-json-pointer"),
    }
)

Schema = dict[str, Any]
Choices = Annotated[list[str], at_most(MAX_CHOICES)]


class _JsonSchema(Wire):
    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    """OpenAI's way to say it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class StructuredOutputs(Wire):
    """vLLM's way to say it: one of these."""

    json_: Schema | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Schema | str | None = None


@dataclass(frozen=True)
class Structure:
    """`kind`: vLLM's name for what `value` is; `param`: the path of the field that has it."""

    kind: str
    value: Any
    param: str

    def given(self) -> dict[str, Any]:
        """As sampling parameters of the stage that makes the text."""
        return {"structured_outputs": {self.kind: self.value}}


def structure_of(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None, guided: Mapping[str, Any]
) -> Structure | None:
    """What a request asks for, by one of the three ways; `guided`: by vLLM's older names of the kinds.

    Raises BadRequest for more than one, and for what could not be compiled, or not within bounds.
    """
    asked = [*_of_format(response_format), *_of_vllm(structured), *_of_guided(guided)]
    if len(asked) > 1:
        first, second = asked[0].param, asked[1].param
        raise invalid(second, f"{first} and {second} are both given; send one of them.")
    for structure in asked:
        _check(structure)
    return asked[0] if asked else None


@contextmanager
def structure_named(structure: Structure | None) -> Iterator[None]:
    """A stage's refusal of what it was to keep to gets the path of its field."""
    try:
        yield
    except GrammarRefused as error:
        param = structure.param if structure is not None else "tools"
        raise invalid(param, f"{param} {error}") from None


def _of_format(given: ResponseFormat | None) -> Iterator[Structure]:
    if given is None or given.type == "text":
        return
    schema = given.json_schema.schema_ if given.json_schema else None
    if given.type == "json_schema" and given.json_schema is None:
        param = "response_format.json_schema"
        raise BadRequest(f"{param} is required.", param=param, code="missing_required_parameter")
    if given.type == "json_object" or schema is None:
        yield Structure("json_object", True, "response_format")
    else:
        yield Structure("json", schema, "response_format.json_schema.schema")


def _of_vllm(given: StructuredOutputs | None) -> Iterator[Structure]:
    if given is None:
        return
    names = {field.alias or name: name for name, field in StructuredOutputs.model_fields.items()}
    for kind, name in names.items():
        value = getattr(given, name)
        if value not in (None, False):
            yield Structure(kind, value, f"structured_outputs.{kind}")


def _of_guided(given: Mapping[str, Any]) -> Iterator[Structure]:
    for kind, value in given.items():
        if value is not None:
            yield Structure(kind, value, f"guided_{kind}")


def _check(structure: Structure) -> None:
    value, param = structure.value, structure.param
    check_size(value, param)
    if structure.kind == "regex":
        check_pattern(value, param)
    elif structure.kind in ("json", "structural_tag"):
        check_schema(_parsed(value, param), param)


def check_size(value: Any, param: str) -> None:
    """Raises BadRequest for a schema or grammar of too many characters."""
    if len(json.dumps(value, ensure_ascii=False)) > MAX_BYTES:
        raise invalid(
            param, f"{param} has more than {MAX_BYTES} characters as JSON, which is the most that is accepted."
        )


def _parsed(value: Schema | str, param: str) -> Schema:
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise invalid(param, f"{param} is {shown(value)}, but it should be a JSON object, as such or as text.")
    return parsed


def check_schema(schema: Mapping[str, Any], param: str, *, is_answer: bool = True) -> None:
    """Raises BadRequest for a schema that is too large, or, of an answer, that says what cannot be kept."""
    for number, (path, depth, node) in enumerate(_nodes(schema, param)):
        if depth > MAX_DEPTH or number >= MAX_NODES:
            what = f"is nested deeper than {MAX_DEPTH}" if depth > MAX_DEPTH else f"has more than {MAX_NODES} parts"
            raise invalid(param, f"{param} {what}, which is the most that is accepted.")
        if isinstance(node, dict):
            _check_reference(node, path)
            _check_patterns(node, path)
            if is_answer:
                _check_kept(node, path)


def _nodes(schema: Any, param: str) -> Iterator[tuple[str, int, Any]]:
    """Path, depth and value of each part."""
    nodes = [(param, 0, schema)]
    while nodes:
        path, depth, node = nodes.pop()
        yield path, depth, node
        if isinstance(node, dict):
            nodes += [(f"{path}.{name[:60]}", depth + 1, each) for name, each in node.items()]
        elif isinstance(node, list):
            nodes += [(f"{path}[{i}]", depth + 1, each) for i, each in enumerate(node)]


_UNSUPPORTED: Mapping[str, tuple[str, ...]] = {
    "integer": ("multipleOf",),
    "number": ("multipleOf",),
    "array": ("uniqueItems", "contains", "minContains", "maxContains"),
}
"""By type, what an answer could not be kept to."""


def _check_reference(node: Mapping[str, Any], path: str) -> None:
    there = node.get("$ref")
    if isinstance(there, str) and there != "#" and not there.startswith("#/"):
        raise invalid(f"{path}.$ref", f"{path}.$ref is {shown(there)}, but it should be '#' or begin with '#/'.")


def _check_patterns(node: Mapping[str, Any], path: str) -> None:
    pattern, of_names = node.get("pattern"), node.get("patternProperties")
    if isinstance(pattern, str):
        check_pattern(pattern, f"{path}.pattern")
    for each in of_names if isinstance(of_names, dict) else ():
        check_pattern(each, f"{path}.patternProperties")


def _check_kept(node: Mapping[str, Any], path: str) -> None:
    kind = node.get("type")
    unsupported = _UNSUPPORTED.get(kind, ()) if isinstance(kind, str) else ()
    for name in unsupported:
        if name in node:
            raise invalid(f"{path}.{name}", f"{path}.{name} is not supported; leave it out.")
    if kind == "string":
        _check_string(node, path)


def _check_string(node: Mapping[str, Any], path: str) -> None:
    form = node.get("format")
    if isinstance(form, str) and form not in STRING_FORMATS:
        known = ", ".join(sorted(STRING_FORMATS))
        raise invalid(f"{path}.format", f"{path}.format is {shown(form)}, but it should be one of {known}.")
    if ("pattern" in node or "format" in node) and ("minLength" in node or "maxLength" in node):
        raise invalid(
            path, f"{path} has a pattern or format and a length, of which only one can be kept; leave one out."
        )


def check_pattern(pattern: str, param: str) -> None:
    """Raises BadRequest for a pattern that would take too long to be compiled."""
    shape = PatternShape(pattern)
    if shape.unrolled > MAX_UNROLLED:
        raise invalid(
            param,
            f"{param} has more than {MAX_UNROLLED} characters with its repetitions written out, "
            "which is the most that is accepted.",
        )
    if shape.is_loose:
        raise invalid(
            param,
            f"{param} repeats a group that holds a '?' or a count of almost any character, "
            "which takes too long to be compiled; use '*' or '+' there, or name the characters.",
        )


_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)
_WIDE = (".", "[^", "\\D", "\\W", "\\S", "\\w", "\\P", "\\p")
"""What stands for thousands of a vocabulary's tokens begins with one of these."""
_DIGITS = 9
"""Of a count: more are too many anyway."""


@dataclass
class _Group:
    """`length`: written out; `is_wide`: of almost any character; `is_loose`: so many of those may come or not."""

    length: int = 0
    is_wide: bool = False
    is_loose: bool = False

    def take(self, atom: _Group) -> None:
        self.length += atom.length
        self.is_wide |= atom.is_wide
        self.is_loose |= atom.is_loose


class PatternShape:
    """How long a pattern is with its counted repetitions written out, and whether one holds another of a wide class."""

    def __init__(self, pattern: str) -> None:
        self.is_loose = False
        self._open = [_Group()]
        self._atom = _Group()
        for piece in _PIECE.finditer(pattern):
            self._read(piece.group(), piece.group(1), piece.group(2))
        self._end_atom()
        self.unrolled = sum(group.length for group in self._open)

    def _read(self, text: str, least: str | None, most: str | None) -> None:
        if least is not None:
            self._repeat(max(_count(least), _count(most), 1), is_counted=True)
        elif text in ("*", "+"):
            self._repeat(1, is_counted=False)
        elif text == "?":
            self._atom.is_loose |= self._atom.is_wide
        else:
            self._end_atom()
            self._begin(text)

    def _begin(self, text: str) -> None:
        if text == "(":
            self._open.append(_Group())
        elif text == ")" and len(self._open) > 1:
            self._atom = self._open.pop()
        elif text not in "|^$":
            self._atom = _Group(1, text.startswith(_WIDE))

    def _repeat(self, times: int, *, is_counted: bool) -> None:
        self.is_loose |= self._atom.is_loose
        self._atom.length *= times
        self._atom.is_loose |= is_counted and self._atom.is_wide

    def _end_atom(self) -> None:
        self._open[-1].take(self._atom)
        self._atom = _Group()


def _count(digits: str | None) -> int:
    return int(digits) if digits and len(digits) <= _DIGITS else 10**_DIGITS if digits else 0
