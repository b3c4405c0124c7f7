"""A body whose length is too large by its header is refused before it comes, and the client gets to read why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from omni_cluster.config.limits import Limits
from omni_cluster.config.loader import load_config
from omni_cluster.models.registry import known_families
from tests.configs import TINY_CONFIG
from tests.server.offering import Answered, Offering, head
from tests.server.speaker import CHAT, speaking

MOST_BYTES = 1_048_576
SENT_BYTES = 32 * MOST_BYTES
"""More than the kernels of both ends keep: a client that sends it all is held up unless the server reads on."""


@pytest.fixture
async def url(tiny: Path) -> AsyncIterator[str]:
    # A server that waits for the body gives up soon, and the test fails.
    limits = Limits(max_body_bytes=MOST_BYTES, upload_timeout_s=5)
    config = load_config(TINY_CONFIG, known_families=known_families()).model_copy(update={"limits": limits})
    async with speaking(config) as url:
        yield url


def start(length: int) -> bytes:
    return head("POST", CHAT, {"Content-Type": "application/json", "Content-Length": str(length)})


async def test_it_is_refused_as_a_body_that_was_read_past_the_limit(url: str) -> None:
    def asked() -> tuple[Answered, Answered]:
        with Offering(url) as client, Offering(url) as other:
            client.send(start(99_999_999_999_999) + b"{")
            return client.answered(), other.ask(CHAT, b" " * (MOST_BYTES + 1), chunked=True)

    declared, read = await asyncio.to_thread(asked)
    assert (declared.status, declared.body) == (413, read.body)
    assert f"more than {MOST_BYTES} bytes".encode() in declared.body


async def test_a_client_that_sends_all_of_it_first_can_read_the_answer_and_ask_again(url: str) -> None:
    """A closed connection would be reset under the bytes that still come, and clients may then drop the answer."""

    def asked() -> list[int]:
        with Offering(url) as client:
            client.send(start(SENT_BYTES))
            refused = client.answered().status
            client.send(b" " * SENT_BYTES + head("GET", "/health", {}))
            return [refused, client.answered().status]

    assert await asyncio.to_thread(asked) == [413, 200]


async def test_as_many_bytes_as_are_accepted_are_read(url: str) -> None:
    def asked() -> Answered:
        with Offering(url) as client:
            client.send(start(MOST_BYTES) + b" " * MOST_BYTES)
            return client.answered()

    answer = await asyncio.to_thread(asked)
    assert answer.status == 400 and b"invalid_json" in answer.body
