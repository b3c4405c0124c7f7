"""ASGI messages of an answer in small parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def payload_bytes(message: dict[str, Any]) -> int:
    """Of an HTTP body, or of what is sent on a WebSocket: bytes, or text by its characters."""
    return len(message.get("body") or message.get("bytes") or message.get("text") or b"")


def parts(message: dict[str, Any], most_bytes: int) -> Iterator[dict[str, Any]]:
    """A message of an answer's body in several, each of `most_bytes` at most; others as they are."""
    body = message.get("body", b"")
    if message["type"] != "http.response.body" or len(body) <= most_bytes:
        yield message
        return
    for start in range(0, len(body), most_bytes):
        is_last = start + most_bytes >= len(body)
        has_more = message.get("more_body", False) or not is_last
        yield {**message, "body": body[start : start + most_bytes], "more_body": has_more}
