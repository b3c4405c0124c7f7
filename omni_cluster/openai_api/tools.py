"""Tools that a client offers the model, and calls of them in earlier answers, as the chat template reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.fields import Others
from omni_cluster.openai_api.wire import Wire, at_most

MAX_ID_CHARS = 4096


class _Function(Wire):
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Wire):
    """A function that the model may call."""

    others = Others(ignored=frozenset({"cache_control"}))

    type: Literal["function"]
    function: _Function


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


def template_tools(tools: Sequence[Tool]) -> tuple[dict[str, Any], ...]:
    return tuple(tool.model_dump(exclude_none=True) for tool in tools)


def template_calls(calls: Sequence[ToolCall], param: str) -> list[dict[str, Any]]:
    """With arguments as objects, which templates write by their own rules. Raises BadRequest that names `param`."""
    return [_template_call(call, f"{param}[{i}].function.arguments") for i, call in enumerate(calls)]


def _template_call(call: ToolCall, param: str) -> dict[str, Any]:
    try:
        arguments = from_json(call.function.arguments)  # refuses what is nested too deep, as for bodies
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise BadRequest(
            f"{param} is no JSON object; send it as the model wrote it.", param=param, code="invalid_value"
        )
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
