"""Bodies of requests: JSON under bounds. A refusal names the first fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.wire import refusal

MAX_MARKS = 65_536
"""Commas and opening brackets of a body, in strings too: values cost memory long before bytes do."""
_SLICE_BYTES = 1 << 20

_Body = TypeVar("_Body", bound=BaseModel)


def parsed(kind: type[_Body], body: bytes | bytearray, max_marks: int = MAX_MARKS) -> _Body:
    """Raises BadRequest with one sentence and the field's path."""
    check_marks(body, max_marks)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)[0]) from None


def validated(kind: type[_Body], value: Mapping[str, Any]) -> _Body:
    """As `parsed`, of what is no JSON any more."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)[0]) from None


def check_size(body: bytes | bytearray, most_bytes: int) -> None:
    if len(body) > most_bytes:
        raise BadRequest(
            f"The request body has {len(body)} bytes, but at most {most_bytes} are accepted.",
            code="request_too_large",
            status=413,
        )


def check_marks(body: bytes | bytearray, most: int) -> None:
    """BadRequest (413) for more values than are accepted, before one of them is made."""
    seen = 0
    for start in range(0, len(body), _SLICE_BYTES):  # in slices, so that other threads run between them
        piece = body[start : start + _SLICE_BYTES]
        seen += piece.count(b",") + piece.count(b"[") + piece.count(b"{")
        if seen > most:
            raise BadRequest(
                f"The request body has more than {most} commas and opening brackets, which is the most that is "
                "accepted; send fewer values.",
                code="request_too_large",
                status=413,
            )
