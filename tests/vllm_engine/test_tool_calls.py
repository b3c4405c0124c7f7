from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import xgrammar
from transformers import AutoTokenizer
from vllm.outputs import CompletionOutput, RequestOutput

from omni_cluster.types.inputs import KnownOutput, ToolUse
from omni_cluster.types.outputs import Call, CallDelta, StageChunk, join_calls
from omni_cluster.types.rows import Rows
from omni_cluster.vllm_engine.chunk_maker import ChunkMaker
from omni_cluster.vllm_engine.output_processor import RowsSink
from omni_cluster.vllm_engine.tool_calls import CallReader, structure_with_calls
from tests.rows import rows_of


def tool(name: str, **fields: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"place": {"enum": ["Oslo"]}}, "required": ["place"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


USE = ToolUse((tool("weather"), tool("time")))
ONE = '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo", "deep": {"a": [1, "}"]}}}\n</tool_call>'
TWO = f'Let me see.\n{ONE}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny)


def read(reader: CallReader, pieces: list[str], end: str = "stop") -> tuple[str, list[CallDelta]]:
    said = [reader.read(piece) for piece in pieces] + [reader.rest(end)]
    return "".join(text for text, _ in said), [delta for _, deltas in said for delta in deltas]


def in_pieces(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_calls_are_told_apart_however_the_text_comes(tokenizer: Any, size: int) -> None:
    text, deltas = read(CallReader("hermes", USE, tokenizer), in_pieces(TWO, size))
    weather, time = join_calls(deltas)
    assert text == "Let me see.\n" and weather.id != time.id and weather.id and time.id
    assert (weather.name, json.loads(weather.arguments)) == ("weather", {"place": "Oslo", "deep": {"a": [1, "}"]}})
    assert (time.name, json.loads(time.arguments)) == ("time", {})


def test_of_each_call_id_and_name_come_first_and_once(tokenizer: Any) -> None:
    _, deltas = read(CallReader("hermes", USE, tokenizer), in_pieces(TWO, 2))
    assert [delta.index for delta in deltas] == sorted(delta.index for delta in deltas)
    for index in (0, 1):
        first, *others = [delta for delta in deltas if delta.index == index]
        assert first.id and first.name and not first.arguments
        assert others and all(each.id is None and each.name is None and each.arguments for each in others)


@pytest.mark.parametrize("cut", range(1, len(TWO), 5))
def test_begun_again_no_piece_comes_twice_or_not_at_all(tokenizer: Any, cut: int) -> None:
    """What the first reader has told, and what another one tells that has read the same text."""
    whole = CallReader("hermes", USE, tokenizer)
    before = [whole.read(piece) for piece in in_pieces(TWO[:cut], 4)]
    again = CallReader("hermes", USE, tokenizer)
    again.read(TWO[:cut])
    text, deltas = read(again, in_pieces(TWO[cut:], 3))
    calls = join_calls([delta for _, each in before for delta in each] + deltas)
    assert "".join(said for said, _ in before) + text == "Let me see.\n"
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("weather", {"place": "Oslo", "deep": {"a": [1, "}"]}}),
        ("time", {}),
    ]
    assert all(call.id for call in calls)


@pytest.mark.parametrize(
    "text", ["Plain.", "a < b", "It ends with <tool_c", "<tool_call>no call</tool_call> at all", "<tool_call>{"]
)
def test_what_is_no_call_is_text(tokenizer: Any, text: str) -> None:
    assert read(CallReader("hermes", USE, tokenizer), in_pieces(text, 4)) == (text, [])


def test_a_call_without_arguments_has_none(tokenizer: Any) -> None:
    bare = '<tool_call>{"name": "time"}</tool_call>'
    _, deltas = read(CallReader("hermes", USE, tokenizer), [bare])
    assert [call.arguments for call in join_calls(deltas)] == ["{}"]
    _, deltas = read(CallReader("hermes", USE, tokenizer), [bare], end="length")
    assert [call.arguments for call in join_calls(deltas)] == [""]


def test_one_call_at_most(tokenizer: Any) -> None:
    _, deltas = read(CallReader("hermes", replace(USE, is_parallel=False), tokenizer), in_pieces(TWO, 9))
    assert [call.name for call in join_calls(deltas)] == ["weather"]


# ---------------------------------------------------------------- what a reply is kept to


def kept_to(use: ToolUse, structure: dict[str, Any] | None = None) -> dict[str, Any]:
    made = structure_with_calls("hermes", use, structure)
    assert made is not None
    tag: dict[str, Any] = json.loads(made["structural_tag"])
    return tag["format"]


def allowed(use: ToolUse, reply: str) -> bool:
    tag = {"type": "structural_tag", "format": kept_to(use)}
    vocabulary = xgrammar.TokenizerInfo([reply[:i] for i in range(1, len(reply) + 1)])
    compiled = xgrammar.GrammarCompiler(vocabulary).compile_structural_tag(json.dumps(tag))
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    return matcher.accept_string(reply)


def names(form: dict[str, Any]) -> set[str]:
    return {name for each in form["tags"] for name in ("weather", "time") if f'"name": "{name}"' in each["begin"]}


def test_a_choice_of_the_model_s_leaves_its_text_free() -> None:
    assert structure_with_calls("hermes", USE, None) is None
    strict = kept_to(ToolUse((tool("weather", strict=True),)))
    assert (strict["type"], strict["triggers"]) == ("triggered_tags", ["<tool_call>"])


def test_a_reply_that_must_call() -> None:
    any_of = kept_to(replace(USE, must_call=True))
    assert any_of["at_least_one"] and not any_of["stop_after_first"] and names(any_of) == {"weather", "time"}
    named = kept_to(replace(USE, must_call=True, name="time"))
    assert named["at_least_one"] and named["stop_after_first"] and names(named) == {"time"}
    assert kept_to(replace(USE, must_call=True, is_parallel=False))["stop_after_first"]


NO_OBJECTS = ["false", "7e5", '"text"', "null", "[]", '[{"a": 1}]']
"""That are JSON."""


@pytest.mark.parametrize(
    "fields",
    [
        {"strict": False},
        {"strict": True, "parameters": None},
        {"parameters": None},
        {"parameters": {}},
        {"parameters": {"description": "Any."}},
        {"parameters": {"required": ["a"]}},
        {"parameters": {"properties": {"a": {"type": "integer"}}}},
        {"parameters": {"type": "object"}},
        {"parameters": {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
        {"parameters": {"oneOf": [{"anyOf": [{"required": ["a"]}]}, {"properties": {"a": {"const": 2}}}]}},
    ],
)
def test_arguments_are_an_object(fields: dict[str, Any]) -> None:
    asked = ToolUse((tool("weather", **fields),), must_call=True)
    for arguments in ['{"a": 1}', *NO_OBJECTS]:
        call = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
        assert allowed(asked, call) == (arguments not in NO_OBJECTS), arguments


@pytest.mark.parametrize("strict", [True, False])
def test_between_marks_is_one_blank_tab_or_line_break_at_most(strict: bool) -> None:
    """As docs/use/chat.md says."""
    asked = ToolUse((tool("weather", strict=strict),), must_call=True)
    for space in ["", " ", "\t", "\n", "\r", "  ", "\r\n", " \n", "\x0b", "\u00a0"]:
        arguments = f'{{{space}"place"{space}:{space}"Oslo"{space}}}'
        call = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
        assert allowed(asked, call) == (space in ["", " ", "\t", "\n", "\r"]), repr(space)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}},
        {"allOf": [{"type": "object"}]},
        {"enum": [{"a": 1}]},
        {"const": {"a": 1}},
        {"anyOf": [{"type": "object"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "object"}}},
    ],
)
def test_a_schema_that_says_its_values_stays_as_it_is(schema: dict[str, Any]) -> None:
    form = kept_to(ToolUse((tool("weather", parameters=schema),), must_call=True))
    assert all(each["content"]["json_schema"] == schema for each in form["tags"])


@pytest.mark.parametrize(
    ("structure", "form"),
    [
        ({"json": {"type": "object"}}, {"type": "json_schema", "json_schema": {"type": "object"}}),
        ({"json": '{"type": "array"}'}, {"type": "json_schema", "json_schema": {"type": "array"}}),
        ({"json_object": True}, {"type": "json_schema", "json_schema": {"type": "object"}}),
        ({"regex": "a+"}, {"type": "regex", "pattern": "a+"}),
        ({"grammar": 'root ::= "a"'}, {"type": "grammar", "grammar": 'root ::= "a"'}),
        ({"choice": ["a"]}, {"type": "const_string", "value": "a"}),
    ],
)
def test_calls_or_an_answer_of_a_structure(structure: dict[str, Any], form: dict[str, Any]) -> None:
    either = kept_to(USE, structure)
    calls, answer = either["elements"]
    assert either["type"] == "or" and names(calls) == {"weather", "time"}
    assert form.items() <= answer.items()
    assert kept_to(replace(USE, must_call=True), structure) == kept_to(replace(USE, must_call=True))


# ---------------------------------------------------------------- what the next stage hears


PROMPT = 3
WIDTH = 2


def rows(start: int, end: int) -> Rows:
    positions = torch.zeros(3, PROMPT, dtype=torch.int64) if start == 0 else None
    return rows_of(start, torch.arange(start, end, dtype=torch.float32)[:, None].repeat(1, WIDTH), positions)


def output(token_ids: list[int], text: str, end: str | None = None) -> RequestOutput:
    completion = CompletionOutput(0, text, token_ids, None, None, finish_reason=end)
    return RequestOutput("r", None, [1] * PROMPT, None, [completion], end is not None)


def heard(tokenizer: Any, steps: list[list[int]], known: tuple[int, ...] = (), use: ToolUse = USE) -> StageChunk:
    """Of a reply whose rows come a step behind its tokens."""
    sink = RowsSink(known=known)
    sink.known_text = tokenizer.decode(known)
    maker = ChunkMaker(sink, KnownOutput(known), None, lambda _: b"", CallReader("hermes", use, tokenizer))
    chunks, fed = [], 0
    for number, token_ids in enumerate(steps):
        end = PROMPT + len(known) + sum(map(len, steps[:number]))
        sink.put(rows(fed, end))
        fed = end
        is_last = number == len(steps) - 1
        chunks.append(maker.make(output(token_ids, tokenizer.decode(token_ids), "stop" if is_last else None)))
    assert all(after.token_start == before.token_end for before, after in pairwise(chunks))
    return StageChunk.joined(chunks)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_rows_of_calls_stay_here(tokenizer: Any, size: int) -> None:
    spoken, called = tokenizer.encode("Hi there. "), tokenizer.encode(ONE)
    assert called[0] == tokenizer.convert_tokens_to_ids("<tool_call>")
    ids = [*spoken, *called]
    made = heard(tokenizer, [ids[i : i + size] for i in range(0, len(ids), size)])
    assert made.rows is not None and (made.rows.start, made.rows.end) == (0, PROMPT + len(spoken))
    assert (made.text, made.token_ids, made.finish_reason) == ("Hi there. ", tuple(ids), "stop")
    assert [call.name for call in join_calls(made.calls)] == ["weather"]


@pytest.mark.parametrize("cut", [2, 6, 12])
def test_so_they_do_when_a_request_is_begun_again(tokenizer: Any, cut: int) -> None:
    spoken, called = tokenizer.encode("Hi. "), tokenizer.encode(ONE)
    ids = [*spoken, *called]
    made = heard(tokenizer, [[token] for token in ids[cut:]], tuple(ids[:cut]))
    assert made.rows is not None and made.rows.end == PROMPT + len(spoken)


def test_a_reply_of_calls_alone_has_rows_of_its_prompt(tokenizer: Any) -> None:
    made = heard(tokenizer, [[token] for token in tokenizer.encode(ONE)])
    assert made.rows is not None and (made.rows.end, made.text) == (PROMPT, "")


def spelled(tokenizer: Any, text: str) -> list[list[int]]:
    """A step for each letter: no mark of calls is one token."""
    return [tokenizer.encode(letter) for letter in text]


def test_a_mark_that_is_spelled_in_pieces(tokenizer: Any) -> None:
    """A reply that must call is calls from its first token on; of another one the pieces have gone on."""
    made = heard(tokenizer, spelled(tokenizer, ONE), use=replace(USE, must_call=True))
    assert made.rows is not None and made.rows.end == PROMPT and made.calls
    made = heard(tokenizer, spelled(tokenizer, ONE))
    assert made.rows is not None and PROMPT < made.rows.end < PROMPT + len(ONE) // 2 and made.calls


def test_calls_of_pieces() -> None:
    deltas = [CallDelta(0, "a", "f"), CallDelta(0, arguments="{"), CallDelta(1, "b", "g"), CallDelta(0, arguments="}")]
    assert join_calls(deltas) == (Call("a", "f", "{}"), Call("b", "g", ""))
