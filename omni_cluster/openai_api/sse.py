"""Server-sent events in the form that OpenAI's clients read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.responses import StreamingResponse

DONE = b"data: [DONE]\n\n"


def event(data: Mapping[str, Any]) -> bytes:
    """One `data:` event with the JSON of `data`. Raises ValueError for NaN and infinity, which JSON lacks."""
    # ASCII only: clients that split lines as str.splitlines does would cut a text at U+2028 or U+0085.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return b"data: " + text.encode("ascii") + b"\n\n"


def named_event(data: Mapping[str, Any]) -> bytes:
    """The same with an `event:` line that says the type of `data`."""
    return b"event: " + data["type"].encode("ascii") + b"\n" + event(data)


class EventStream(StreamingResponse):
    """The answer whose body is events. One that fails after its first byte ends with the error's body as an event."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], headers: Mapping[str, str] | None = None, media_type: str | None = None
    ) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", **(headers or {})}, media_type=media_type)
