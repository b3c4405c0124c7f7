"""Tools that a client offers the model, and calls of them in earlier answers, as the chat template reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag
from pydantic_core import from_json

from omni_cluster.openai_api.errors import invalid
from omni_cluster.openai_api.fields import Others
from omni_cluster.openai_api.structured import Structure, check_schema, check_size
from omni_cluster.openai_api.wire import Wire, at_most, by_json_type, shown
from omni_cluster.types.tool_use import ToolUse

MAX_ID_CHARS = 4096


_NAME = Field(min_length=1, max_length=64, pattern=r'^[^"\\\x00-\x1f]*$')
"""Of a function: its calls are JSON."""


class _Function(Wire):
    name: str = _NAME
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Wire):
    """A function that the model may call."""

    others = Others(ignored=frozenset({"cache_control"}))

    type: Literal["function"]
    function: _Function


class _Named(Wire):
    name: str = Field(min_length=1, max_length=64)


class NamedTool(Wire):
    """The function that the model must call."""

    type: Literal["function"]
    function: _Named


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("#string")] | Annotated[NamedTool, Tag("#object")],
    by_json_type("should be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': <name>}}"),
]


class _CalledFunction(Wire):
    name: str = Field(min_length=1, max_length=64)
    arguments: str


class ToolCall(Wire):
    """A call in an earlier answer; `arguments` is a JSON object as text."""

    # Of the pieces of a stream that a client put together.
    others = Others(ignored=frozenset({"index"}))

    id: Annotated[str, at_most(MAX_ID_CHARS)]
    type: Literal["function"] = "function"
    function: _CalledFunction


def tool_use_of(
    tools: Sequence[Tool], choice: ToolChoice | None, is_parallel: bool | None, structure: Structure | None
) -> ToolUse | None:
    """What the reply may call; None for nothing. `structure`: what its text is to be if it calls nothing.

    Raises BadRequest for a choice that is not among the tools, and for schemas of arguments that are of no object, or
    too large.
    """
    _check_of_objects(tools)
    if not tools:
        _check_no_choice(choice)
    if not tools or choice == "none":
        return None
    name = choice.function.name if isinstance(choice, NamedTool) else None
    chosen = [tool for tool in tools if name in (None, tool.function.name)]
    if not chosen:
        param, names = "tool_choice.function.name", ", ".join(sorted(tool.function.name for tool in tools))
        raise invalid(param, f"{param} is {shown(name)}, but the tools are {names}.")
    must_call = name is not None or choice == "required"
    if must_call or structure is not None or any(tool.function.strict for tool in tools):
        _check_schemas(tools, name)
    return ToolUse(template_tools(tools), must_call, name, is_parallel is not False)


def _check_no_choice(choice: ToolChoice | None) -> None:
    if choice == "required" or isinstance(choice, NamedTool):
        raise invalid(
            "tool_choice", "tool_choice asks for a call, but no tools are given; send tools, or leave tool_choice out."
        )


def _check_of_objects(tools: Sequence[Tool]) -> None:
    for i, tool in enumerate(tools):
        param, parameters = f"tools[{i}].function.parameters", tool.function.parameters or {}
        if "type" in parameters and parameters["type"] not in ("object", ["object"]):
            raise invalid(f"{param}.type", f"{param}.type is {shown(parameters['type'])}, but it should be 'object'.")
        _check_values_are_objects(parameters, param)


def _check_values_are_objects(schema: Mapping[str, Any], param: str) -> None:
    """Those that the schema, or each of its alternatives, names as the only ones."""
    named = {"const": schema["const"]} if "const" in schema else {}
    if isinstance(schema.get("enum"), list):
        named |= {f"enum[{i}]": each for i, each in enumerate(schema["enum"])}
    for name, value in named.items():
        if not isinstance(value, dict):
            raise invalid(f"{param}.{name}", f"{param}.{name} is {shown(value)}, but it should be an object.")
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            for i, each in enumerate(schema[name]):
                if isinstance(each, Mapping):
                    _check_values_are_objects(each, f"{param}.{name}[{i}]")


def _check_schemas(tools: Sequence[Tool], name: str | None) -> None:
    """Of what the reply is kept to: all tools' together have no more room than one schema."""
    parameters = {
        f"[{i}]": tool.function.parameters for i, tool in enumerate(tools) if name in (None, tool.function.name)
    }
    check_size(parameters, "tools")
    for i, tool in enumerate(tools):
        if name in (None, tool.function.name):
            check_schema(tool.function.parameters or {}, f"tools[{i}].function.parameters", is_answer=False)


def template_tools(tools: Sequence[Tool]) -> tuple[dict[str, Any], ...]:
    return tuple(tool.model_dump(exclude_none=True) for tool in tools)


def template_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """With arguments as objects, which templates write by their own rules."""
    return [_template_call(call) for call in calls]


def _template_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": template_arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def template_arguments(text: str) -> dict[str, Any] | str:
    """As the text that it is where it is no object: a call that reached its limit was cut in it."""
    try:
        arguments = from_json(text)  # refuses what is nested too deep, as for bodies
    except ValueError:
        return text
    return arguments if isinstance(arguments, dict) else text
