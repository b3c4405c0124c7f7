"""Server-sent events in the form that OpenAI's clients read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from omni_cluster.openai_api.errors import error_body

DONE = b"data: [DONE]\n\n"


def event(data: Mapping[str, Any]) -> bytes:
    """One `data:` event with the JSON of `data`. Raises ValueError for NaN and infinity, which JSON lacks."""
    # ASCII only: clients that split lines as str.splitlines does would cut a text at U+2028 or U+0085.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return b"data: " + text.encode("ascii") + b"\n\n"


def named_event(data: Mapping[str, Any]) -> bytes:
    """The same with an `event:` line that says the type of `data`."""
    return b"event: " + data["type"].encode("ascii") + b"\n" + event(data)


def error_event(message: str, *, status: int = 500, param: str | None = None, code: str | None = None) -> bytes:
    """The event that ends a stream which has begun and then failed; `status` only chooses the error's type."""
    return event(error_body(message, status=status, param=param, code=code))
