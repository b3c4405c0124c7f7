"""What `/openapi.json` says of routes that read their bodies themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel

_DEFINITION = "#/$defs/"

_ERROR_BODY = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def request_body(
    model: type[BaseModel], models: Collection[str], media_type: str = "application/json"
) -> dict[str, Any]:
    """A route's `openapi_extra`: its body is a `model`, and its field `model` is one of `models`."""
    schema = model.model_json_schema()
    schema["properties"]["model"] = {"type": "string", "enum": sorted(models)}
    content = {media_type: {"schema": _inlined(schema, schema.get("$defs", {}))}}
    return {"requestBody": {"required": True, "content": content}}


def answers(*media_types: str) -> dict[int | str, dict[str, Any]]:
    """A route's `responses`: 200 in one of `media_types`, and errors in the one form that all have."""
    # Ray Serve answers 429 itself, in a form of its own.
    refusal = {"description": "One sentence says why.", "content": {"application/json": {"schema": _ERROR_BODY}}}
    return {
        200: {"description": "The answer.", "content": {media_type: {} for media_type in media_types}},
        429: {"description": "Too many requests run and wait."},
        "4XX": refusal,
        "5XX": refusal,
    }


def _inlined(node: Any, definitions: Mapping[str, Any]) -> Any:
    """The schema without references, which would mean other places inside of an OpenAPI document, and class names."""
    if isinstance(node, list):
        return [_inlined(each, definitions) for each in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(definitions[node["$ref"].removeprefix(_DEFINITION)], definitions)
    is_class_name = isinstance(node.get("title"), str)
    left_out = {"$defs", "title"} if is_class_name else {"$defs"}
    return {name: _inlined(each, definitions) for name, each in node.items() if name not in left_out}
