from __future__ import annotations

import json
from typing import Any

import pytest

from omni_cluster.openai_api.chat import check_chat_request
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.structured import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_NODES,
    MAX_UNROLLED,
    PatternShape,
    Structure,
    structure_named,
)
from omni_cluster.types.errors import GrammarRefused
from tests.openai_api.parts import LIMITS

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SCHEMA_PARAM = "response_format.json_schema.schema"


def asked(**fields: Any) -> Structure | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    checked = check_chat_request(json.dumps(body).encode(), models=["m"], voices=["v"], limits=LIMITS)
    return checked.structure


def of_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


@pytest.mark.parametrize(
    ("fields", "kind", "value", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "json_object", True, None),
        ({"response_format": of_schema(SCHEMA)}, "json", SCHEMA, SCHEMA_PARAM),
        ({"response_format": of_schema(SCHEMA, strict=True, description="x")}, "json", SCHEMA, SCHEMA_PARAM),
        ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json", json.dumps(SCHEMA), None),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"], "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar", 'root ::= "a"', None),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "json_object", True, None),
        ({"guided_json": SCHEMA}, "json", SCHEMA, "guided_json"),
        ({"guided_regex": "[ab]"}, "regex", "[ab]", "guided_regex"),
        ({"guided_choice": ["a"]}, "choice", ["a"], "guided_choice"),
        ({"guided_grammar": 'root ::= "a"', "min_tokens": 0}, "grammar", 'root ::= "a"', "guided_grammar"),
    ],
)
def test_what_a_text_must_be(fields: dict[str, Any], kind: str, value: Any, param: str | None) -> None:
    structure = asked(**fields)
    assert structure is not None
    assert structure.given() == {"structured_outputs": {kind: value}}
    assert param in (None, structure.param)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": None, "guided_json": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "whitespace_pattern": None}},
    ],
)
def test_any_text(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


def nested(depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {"type": "string"}


BOMB = "((a{0,100}){0,100}){0,100}"
OBJECT = f"{SCHEMA_PARAM}.properties.a"


def of_property(**schema: Any) -> dict[str, Any]:
    return {"response_format": of_schema({"type": "object", "properties": {"a": schema}})}


@pytest.mark.parametrize(
    ("fields", "param", "fragment"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "should be 'text', 'json_object' or"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
        ({"response_format": of_schema(5)}, SCHEMA_PARAM, "should be"),
        ({"response_format": of_schema({"enum": ["x" * MAX_BYTES]})}, SCHEMA_PARAM, "characters as JSON"),
        ({"response_format": of_schema(nested(MAX_DEPTH))}, SCHEMA_PARAM, "nested deeper than"),
        ({"response_format": of_schema({"enum": list(range(MAX_NODES))})}, SCHEMA_PARAM, "parts, which is the most"),
        (of_property(type="integer", multipleOf=5), f"{OBJECT}.multipleOf", "is not supported; leave it out"),
        (of_property(type="array", uniqueItems=True), f"{OBJECT}.uniqueItems", "is not supported; leave it out"),
        (of_property(type="string", format="colour"), f"{OBJECT}.format", 'is "colour", but it should be one of date'),
        (of_property(type="string", pattern="a", maxLength=3), OBJECT, "of which only one can be kept"),
        (of_property(type="string", pattern=BOMB), f"{OBJECT}.pattern", "with its repetitions written out"),
        (of_property(**{"$ref": "https://a.b/c"}), f"{OBJECT}.$ref", "should be '#' or begin with '#/'"),
        (of_property(patternProperties={BOMB: {}}), f"{OBJECT}.patternProperties", "repetitions written out"),
        ({"structured_outputs": {"regex": BOMB}}, "structured_outputs.regex", "with its repetitions written out"),
        ({"structured_outputs": {"regex": "a", "json": {"type": "object"}}}, None, "are both given; send one of them"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "use regex, or leave it out"),
        ({"structured_outputs": {"json": "no"}}, "structured_outputs.json", "should be a JSON object"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice[1]", "should be a valid string"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "response_format and guided_regex are both given",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(fields: dict[str, Any], param: str | None, fragment: str) -> None:
    with pytest.raises(BadRequest) as caught:
        asked(**fields)
    assert fragment in caught.value.message and caught.value.message.count(". ") == 0
    assert caught.value.param == (param or caught.value.param) and caught.value.status == 400


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        ("abc", 3),
        ("[a-z]{1,5}", 5),
        ("(ab|c){3}", 9),
        ("a{2,}", 2),
        (r"\d{3}-\d{4}", 8),
        ("a{2}{3}", 6),
        ("[]{9}]{4}", 4),
        (r"\({7}", 7),
        ("(((", 0),
        ("x)))", 4),
        ("{3}", 0),
        ("(a{100}){100}", 10_000),
        ("a{" + "9" * 5000 + "}", 10**9),
    ],
)
def test_a_pattern_with_its_repetitions_written_out(pattern: str, length: int) -> None:
    assert PatternShape(pattern).unrolled == length


@pytest.mark.parametrize(
    "pattern", ["([^b]{0,16}c?)*", "(.?){2,9}", "((x|[^b]){0,4}c){0,4}", r"(a(\W{2})b)+", "((.?)a)+"]
)
def test_a_repeated_group_of_almost_any_characters_is_refused(pattern: str) -> None:
    with pytest.raises(BadRequest, match=r"guided_regex repeats a group that holds a '\?' or a count"):
        asked(guided_regex=pattern)


@pytest.mark.parametrize(
    "pattern",
    [r"(\d{1,3}\.){3}\d{1,3}", "([^,]*,)*", "(.+)?x", ".{0,50}", "([a-z]{1,30}-){1,30}", "a?(.{3})b", "(b?)*"],
)
def test_common_patterns_pass(pattern: str) -> None:
    assert asked(guided_regex=pattern) is not None


def test_a_pattern_at_its_bound_passes() -> None:
    assert asked(guided_regex=f"[a-z]{{0,{MAX_UNROLLED}}}") is not None
    with pytest.raises(BadRequest):
        asked(guided_regex=f"[a-z]{{0,{MAX_UNROLLED + 1}}}")


def test_a_stages_refusal_gets_the_path_of_its_field() -> None:
    with pytest.raises(BadRequest) as caught, structure_named(Structure("regex", "(", "guided_regex")):
        raise GrammarRefused("is invalid.")
    assert (caught.value.param, caught.value.message) == ("guided_regex", "guided_regex is invalid.")
