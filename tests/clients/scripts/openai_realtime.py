"""OpenAI's own client in Python: a realtime session, with the server's turn detection."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI
from spoken import (
    FIRST,
    LONG_TOKENS,
    PATIENCE_S,
    SECOND,
    Microphone,
    cancelled,
    microphone,
    no_session_is_open,
)
from told import KEY, MAX_OBJECT_TOKENS, MAX_TOKENS, MODEL, QUESTION, TOOL, TOOL_RESULT, URL, doing, kept

TEXT, SOUND = "response.output_audio_transcript.delta", "response.output_audio.delta"
client = AsyncOpenAI(base_url=URL, api_key=KEY)


class Talk:
    """A connection, and a microphone that is on."""

    def __init__(self, connection: Any, mic: Microphone) -> None:
        self.connection, self.mic = connection, mic

    async def until(self, kind: str) -> list[Any]:
        """The events up to the next of that type."""
        events: list[Any] = []
        async with asyncio.timeout(PATIENCE_S):
            while not events or events[-1].type != kind:
                events.append(await self.connection.recv())
                if events[-1].type == "error":
                    raise RuntimeError(events[-1].error.message)
        return events

    async def update(self, **session: Any) -> None:
        await self.connection.session.update(session={"type": "realtime", **session})
        await self.until("session.updated")


@asynccontextmanager
async def talk() -> AsyncIterator[Talk]:
    async with client.realtime.connect(model=MODEL) as connection:

        async def send(sound: bytes) -> None:
            await connection.input_audio_buffer.append(audio=base64.b64encode(sound).decode())

        async with microphone(send) as mic:
            yield Talk(connection, mic)


def joined(events: Sequence[Any], kind: str) -> list[str]:
    return [event.delta for event in events if event.type == kind]


def usage_of(response: Any) -> dict[str, int]:
    usage = response.usage
    return {
        "text in": usage.input_token_details.text_tokens,
        "sound in": usage.input_token_details.audio_tokens,
        "text out": usage.output_token_details.text_tokens,
    }


async def turns(it: Talk) -> None:
    await it.update(max_output_tokens=MAX_TOKENS)
    with doing("spoken turn") as seen:
        it.mic.say(FIRST)
        events = await it.until("response.done")
        first = events[-1].response
        sound = b"".join(map(base64.b64decode, joined(events, SOUND)))
        seen |= {"text": "".join(joined(events, TEXT)), "file": kept("spoken.pcm", sound)}
    with doing("second turn") as seen:
        it.mic.say(SECOND)
        events = await it.until("response.done")
        seen |= {"text": "".join(joined(events, TEXT)), "first": usage_of(first)}
        seen["second"] = usage_of(events[-1].response)
        await it.connection.conversation.item.retrieve(item_id=first.output[0].id)
        retrieved = (await it.until("conversation.item.retrieved"))[-1].item
        seen["kept"] = retrieved.content[0].transcript == first.output[0].content[0].transcript


async def interruption(it: Talk) -> None:
    with doing("interruption") as seen:
        await it.update(max_output_tokens=LONG_TOKENS)
        it.mic.say(FIRST)
        item_id = (await it.until(TEXT))[-1].item_id
        it.mic.say(SECOND)
        await it.until("input_audio_buffer.speech_started")
        await it.connection.conversation.item.truncate(item_id=item_id, content_index=0, audio_end_ms=100)
        done = (await it.until("response.done"))[-1].response
        seen |= {"status": done.status, "reason": done.status_details.reason}
        await it.until("conversation.item.truncated")
        # What is begun in a pause of the second sentence begins again with the new setting.
        await it.update(max_output_tokens=MAX_TOKENS)
        later = await it.until("response.done")
        seen["late"] = [event.type for event in later if getattr(event, "response_id", None) == done.id]
        seen["text"] = "".join(joined(later, TEXT))


async def tool(it: Talk) -> None:
    with doing("tool") as seen:
        flat = {"type": "function", **TOOL["function"]}
        named = {"type": "function", "name": "set_lamp"}
        await it.update(tools=[flat], tool_choice=named, max_output_tokens=MAX_OBJECT_TOKENS)
        it.mic.say(FIRST)
        (call,) = (await it.until("response.done"))[-1].response.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": TOOL_RESULT}
        await it.connection.conversation.item.create(item=result)
        await it.connection.response.create(response={"tool_choice": "none", "max_output_tokens": MAX_TOKENS})
        text = "".join(joined(await it.until("response.done"), TEXT))
        seen |= {"name": call.name, "arguments": json.loads(call.arguments), "text": text}


async def dropped_connection() -> None:
    with doing("dropped connection") as seen:
        before = await cancelled()
        async with talk() as it:
            await it.update(max_output_tokens=LONG_TOKENS)
            it.mic.say(FIRST)
            await it.until(TEXT)
            it.connection._connection.transport.abort()
            await no_session_is_open()
        seen["cancelled"] = await cancelled() - before
        async with talk() as it:
            content: list[Any] = [{"type": "input_text", "text": QUESTION}]
            await it.connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
            await it.connection.response.create(response={"max_output_tokens": MAX_TOKENS})
            seen["text"] = "".join(joined(await it.until("response.done"), TEXT))


async def main() -> None:
    async with talk() as it:
        await turns(it)
        await interruption(it)
        await tool(it)
    await dropped_connection()


asyncio.run(main())
