"""What a client sends is held until a handler takes it, and no more of it than may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from starlette.types import Message
from starlette.websockets import WebSocket

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.server.realtime.inbox import Inbox


def inbox_of(texts: Sequence[str], most_bytes: int) -> Inbox:
    """Of a client that sends the texts and leaves."""
    messages: list[Message] = [
        {"type": "websocket.connect"},
        *({"type": "websocket.receive", "text": text} for text in texts),
        {"type": "websocket.disconnect", "code": 1000},
    ]

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError("an inbox says nothing")

    return Inbox(WebSocket({"type": "websocket", "headers": []}, receive, send), most_bytes)


async def filled(texts: Sequence[str], most_bytes: int) -> Inbox:
    inbox = inbox_of(texts, most_bytes)
    await inbox._socket.receive()  # the handshake
    await inbox.fill()
    return inbox


async def test_all_that_came_is_given_in_order_and_then_it_ends() -> None:
    inbox = await filled(["a", "", "b" * 8], most_bytes=9)
    assert [text async for text in inbox.texts()] == ["a", "", "b" * 8]


async def test_a_client_that_sends_faster_than_it_is_handled_is_told() -> None:
    inbox = await filled(["a" * 5, "b" * 5, "c"], most_bytes=9)
    with pytest.raises(BadRequest, match="More than 9 bytes of events wait to be handled") as refused:
        _ = [text async for text in inbox.texts()]
    assert refused.value.code == "too_fast"


async def test_one_event_may_be_larger_than_what_may_wait() -> None:
    inbox = await filled(["a" * 20], most_bytes=9)
    assert [text async for text in inbox.texts()] == ["a" * 20]


async def test_a_connection_that_breaks_ends_the_texts() -> None:
    broken = inbox_of([], most_bytes=9)
    await broken._socket.receive()  # the handshake
    broken._socket._receive = _breaks
    with pytest.raises(ConnectionError):
        await broken.fill()
    assert [text async for text in broken.texts()] == []


async def _breaks() -> Message:
    raise ConnectionError
