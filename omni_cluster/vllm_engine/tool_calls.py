"""Calls of tools in a reply: what the reply is kept to, and how they are found in its text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaToolCall
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionRequest,
    ChatCompletionToolsParam,
)
from vllm.tokenizers import TokenizerLike
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager
from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag

from omni_cluster.types.inputs import ToolUse
from omni_cluster.types.outputs import CallDelta

MOST_WHITESPACE = 1
"""Between two marks of a call's JSON: a model may make no end of it.

xgrammar can forbid tabs and line breaks in a schema alone, but not in one that is part of a tag. Its grammar of the
schema, printed into the tag, is read as another one: of a name with `ß2` it makes a different letter.
"""
_SAYS_VALUES = frozenset({"type", "$ref", "allOf", "enum", "const", "not"})
"""Words of a schema that may contradict a type beside them, or are combined with it in ways that xgrammar lacks."""
_SAYS_PROPERTIES = frozenset(
    {"properties", "patternProperties", "propertyNames", "additionalProperties", "unevaluatedProperties"}
)


def structure_with_calls(parser: str, use: ToolUse, structure: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """What a reply that may call tools is kept to, as vLLM's structured output; None for any text.

    `structure`: what its text is to be if it calls none.
    """
    must_call = use.must_call or structure is not None
    tag = get_model_structural_tag(
        model=ToolParserManager.get_tool_parser(parser).structural_tag_model or "",
        tools=[ChatCompletionToolsParam(**tool) for tool in _kept_to_schemas(use.tools, must_call)],
        tool_choice=_choice(use.name, must_call),
        reasoning=False,
    )
    if tag is None:
        return structure
    calls: dict[str, Any] = tag.model_dump(mode="json")["format"]
    if must_call and not use.is_parallel:
        calls["stop_after_first"] = True
    if structure is not None and not use.must_call:
        calls = {"type": "or", "elements": [calls, *_formats(structure)]}
    _bound_whitespace(calls)
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": calls})}


def _kept_to_schemas(tools: Sequence[Mapping[str, Any]], must_call: bool) -> Sequence[Mapping[str, Any]]:
    """With `strict` where a tool says nothing of it: vLLM leaves the arguments of such a tool free.

    Where a reply may call none, and no tool is strict, the reply is kept to nothing.
    """
    if not must_call and not any(tool["function"].get("strict") for tool in tools):
        return tools
    return [{**tool, "function": _kept_to_schema(tool["function"])} for tool in tools]


def _kept_to_schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without a schema to keep to, vLLM would allow any JSON, of which a number is one."""
    schema = None if function.get("strict") is False else function.get("parameters")
    return {**function, "strict": True, "parameters": _of_objects(schema or {})}


def _of_objects(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema that leaves its type open, of objects only; one that says its values stays as it is.

    xgrammar heeds nothing beside `anyOf` and `oneOf`, so their branches get the type. Of an object that names no
    properties it would allow the empty one alone.
    """
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return {**schema, name: [_of_objects(each) if isinstance(each, Mapping) else each for each in schema[name]]}
    if _SAYS_VALUES & schema.keys():
        return schema
    return {**({} if _SAYS_PROPERTIES & schema.keys() else {"additionalProperties": True}), **schema, "type": "object"}


def _choice(name: str | None, must_call: bool) -> Any:
    if name is not None:
        return ChatCompletionNamedToolChoiceParam(function={"name": name})  # type: ignore[arg-type]
    return "required" if must_call else "auto"


def _formats(structure: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The structure as parts of a structural tag, of which one is to be kept to."""
    ((kind, value),) = structure.items()
    if kind in ("json", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else value
        return [{"type": "json_schema", "json_schema": json.loads(schema) if isinstance(schema, str) else schema}]
    if kind == "choice":
        return [{"type": "const_string", "value": each} for each in value]
    if kind == "structural_tag":
        tag = json.loads(value) if isinstance(value, str) else value
        return [tag.get("format", {})]
    return [{"type": kind, {"regex": "pattern"}.get(kind, kind): value}]


def _bound_whitespace(node: Any) -> None:
    nodes = [node]
    while nodes:
        each = nodes.pop()
        if isinstance(each, list):
            nodes += each
        elif isinstance(each, dict) and each.get("type") == "json_schema":
            each["max_whitespace_cnt"] = MOST_WHITESPACE
        elif isinstance(each, dict):
            nodes += each.values()


class CallReader:
    """Tells calls apart from a reply's text as it comes, by vLLM's parser."""

    def __init__(self, parser: str, use: ToolUse, tokenizer: TokenizerLike) -> None:
        tools = [ChatCompletionToolsParam(**tool) for tool in use.tools]
        self._parser: ToolParser = ToolParserManager.get_tool_parser(parser)(tokenizer, tools)
        self._request = ChatCompletionRequest(messages=[], tools=tools)
        self.is_all = use.must_call
        """Whether the reply is calls and nothing else."""
        self._is_parallel = use.is_parallel
        self.mark: int | None = tokenizer.get_vocab().get(getattr(self._parser, "tool_call_start_token", ""))
        """The token that a call begins with."""
        self._text = ""
        self._told = 0
        self._arguments: dict[int, str] = {}

    def read(self, text: str) -> tuple[str, tuple[CallDelta, ...]]:
        """What of the reply's next text is text, and what calls. Some is kept until more of it has come."""
        if not text:
            return "", ()
        before, self._text = self._text, self._text + text
        said = self._parser.extract_tool_calls_streaming(before, self._text, text, (), (), (), self._request)
        content = (said.content if said is not None else None) or ""
        self._told += len(content)
        deltas = [_delta(call) for call in (said.tool_calls if said is not None else ())]
        for delta in deltas:
            self._arguments[delta.index] = self._arguments.get(delta.index, "") + delta.arguments
        return content, tuple(delta for delta in deltas if self._is_parallel or delta.index == 0)

    def rest(self, finish_reason: str) -> tuple[str, tuple[CallDelta, ...]]:
        """What is left at the reply's end: text that turned out to be no call, arguments of a call without any."""
        if not self._arguments:
            return self._text[self._told :], ()
        bare = [index for index, arguments in self._arguments.items() if not arguments]
        has_ended = finish_reason == "stop"
        return "", tuple(CallDelta(i, arguments="{}") for i in bare if has_ended and (self._is_parallel or i == 0))


def _delta(call: DeltaToolCall) -> CallDelta:
    function = call.function
    name, arguments = (function.name, function.arguments) if function is not None else (None, None)
    return CallDelta(call.index, call.id, name, arguments or "")
