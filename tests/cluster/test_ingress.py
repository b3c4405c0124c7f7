"""What the ingress's application receives once its client has left."""

from __future__ import annotations

import pytest
from ray.exceptions import ObjectStoreFullError, TaskCancelledError
from starlette.types import Message, Receive, Scope, Send

from omni_cluster.cluster.ingress import until_client_leaves
from omni_cluster.errors import StoreFull


async def received(kind: str, raised: Exception) -> list[Message]:
    """By an application, when Serve's own `receive` raises."""
    messages = []

    async def receive() -> Message:
        raise raised

    async def send(message: Message) -> None:
        pytest.fail("nothing is sent")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        messages.append(await receive())

    await until_client_leaves(app)({"type": kind}, receive, send)
    return messages


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_a_call_that_serve_ended_is_a_client_that_left(kind: str) -> None:
    (message,) = await received(kind, TaskCancelledError())
    assert message["type"] == f"{kind}.disconnect"


async def test_a_body_that_found_no_room_is_named_so() -> None:
    with pytest.raises(StoreFull):
        await received("http", ObjectStoreFullError())
