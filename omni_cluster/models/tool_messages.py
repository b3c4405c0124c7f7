"""Tools, calls and their results as messages of text, for templates that have no place for them: as the published
templates of Qwen's models for text write them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

Message = Mapping[str, Any]
Objects = Sequence[Mapping[str, Any]]

_BEFORE_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_BEHIND_TOOLS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def as_text(messages: Objects, tools: Objects, system: str = "") -> list[Message]:
    """The conversation for a template that knows system, user and assistant alone.

    `system`: what the model is told in place of a system message.
    """
    return [*_results_joined([_called(message) for message in _with_tools(messages, tools, system)])]


def _with_tools(messages: Objects, tools: Objects, system: str) -> list[Message]:
    """With the tools at the end of the system message, which is made if there is none."""
    if not tools:
        return list(messages)
    has_system = bool(messages) and messages[0]["role"] == "system"
    first: Message = messages[0] if has_system else {"role": "system", "content": system}
    listed = "".join(f"\n{_json(tool)}" for tool in tools)
    told = "\n\n" if has_system or system else ""
    parts = [*_parts(first), _text(told + _BEFORE_TOOLS + listed + _BEHIND_TOOLS)]
    return [{**first, "content": parts}, *messages[has_system:]]


def _called(message: Message) -> Message:
    """Calls of an earlier answer as the text that they were."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    said = _parts(message)
    has_said = any(part.get("text", True) for part in said)
    text = "\n".join(_call(call["function"]) for call in calls)
    parts = [*said, _text(f"\n{text}")] if has_said else [_text(text)]
    return {"role": message["role"], "content": parts}


def _call(function: Mapping[str, Any]) -> str:
    """Arguments that are text were cut, and stay as they are."""
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else _json(arguments)
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {written}}}\n</tool_call>'


def _results_joined(messages: Objects) -> Iterator[Message]:
    """Results that follow each other as one message of the user."""
    for is_result, some in groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_result:
            yield {"role": "user", "content": [part for i, each in enumerate(some) for part in _result(each, i > 0)]}
        else:
            yield from some


def _result(message: Message, follows: bool) -> list[Mapping[str, Any]]:
    opening = "\n<tool_response>\n" if follows else "<tool_response>\n"
    return [_text(opening), *_parts(message), _text("\n</tool_response>")]


def _parts(message: Message) -> list[Mapping[str, Any]]:
    content = message.get("content") or ()
    return [_text(content)] if isinstance(content, str) else list(content)


def _text(text: str) -> Mapping[str, Any]:
    return {"type": "text", "text": text}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
