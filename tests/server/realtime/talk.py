"""A client of realtime sessions: OpenAI's own, which is told the server's address and nothing else."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
from openai import AsyncOpenAI
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

PATIENCE_S = 60
KNOWN: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)


class Talk:
    """One session. All that it is told is what OpenAI's types say, and is kept."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.told: list[dict[str, Any]] = []

    async def send(self, kind: str, **fields: Any) -> None:
        await self._connection.send({"type": kind, **fields})

    async def next(self) -> dict[str, Any]:
        data = await asyncio.wait_for(self._connection.recv_bytes(), PATIENCE_S)
        KNOWN.validate_json(data, strict=False)
        event: dict[str, Any] = KNOWN.validate_json(data).model_dump(mode="json", exclude_unset=True)
        self.told.append(event)
        return event

    async def until(self, kind: str) -> list[dict[str, Any]]:
        """The events up to the next of that type, which is the last. An error that is not asked for fails the test."""
        events = []
        while not events or events[-1]["type"] != kind:
            events.append(await self.next())
            assert kind == "error" or events[-1]["type"] != "error", events[-1]
        return events

    async def refused(self) -> dict[str, Any]:
        """The error that comes next."""
        error: dict[str, Any] = (await self.until("error"))[-1]["error"]
        return error

    async def update(self, **session: Any) -> dict[str, Any]:
        await self.send("session.update", session={"type": "realtime", **session})
        updated: dict[str, Any] = (await self.until("session.updated"))[-1]["session"]
        return updated

    async def say(self, text: str, **item: Any) -> dict[str, Any]:
        content = [{"type": "input_text", "text": text}]
        return await self.create({"type": "message", "role": "user", "content": content, **item})

    async def create(self, item: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        await self.send("conversation.item.create", item=item, **fields)
        done: dict[str, Any] = (await self.until("conversation.item.done"))[-1]
        return done

    async def answer(self, **response: Any) -> list[dict[str, Any]]:
        """The events of a response."""
        await self.send("response.create", **({"response": response} if response else {}))
        return await self.until("response.done")


@contextlib.asynccontextmanager
async def talk(url: str, key: str = "no-key-is-needed", model: str = "gpt-realtime") -> AsyncIterator[Talk]:
    """`url`: of the server, as clients of HTTP have it."""
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
    async with client, client.realtime.connect(model=model) as connection:
        yield Talk(connection)


def kinds(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """The types of the events, those that come several times in a row once."""
    named = [event["type"] for event in events]
    return [name for i, name in enumerate(named) if i == 0 or named[i - 1] != name]


def text_of(events: Sequence[Mapping[str, Any]]) -> str:
    ends = ("response.output_text.delta", "response.output_audio_transcript.delta")
    return "".join(event["delta"] for event in events if event["type"] in ends)


def sound_of(events: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Samples of 16 bits."""
    pieces = [base64.b64decode(event["delta"]) for event in events if event["type"] == "response.output_audio.delta"]
    return np.frombuffer(b"".join(pieces), "<i2")
