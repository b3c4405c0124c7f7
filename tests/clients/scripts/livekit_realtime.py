"""LiveKit's OpenAI realtime plugin, asked as its agent sessions ask it, with all of its defaults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import aiohttp
from livekit import rtc
from livekit.agents import llm
from livekit.agents.llm import function_tool
from livekit.agents.metrics import RealtimeModelMetrics
from livekit.plugins import openai
from spoken import FIRST, LONG_TOKENS, RATE_HZ, SECOND, Microphone, cancelled, microphone, no_session_is_open, until
from told import KEY, MAX_OBJECT_TOKENS, MAX_TOKENS, MODEL, TOOL_RESULT, URL, doing, kept

PLAYED_MS = 100
"""What a player has played of an answer that is interrupted."""


@function_tool
async def set_lamp(color: Literal["red", "green"], on: bool) -> str:
    """Sets the lamp."""
    return TOOL_RESULT


class Said:
    """An answer, while it comes and after that."""

    def __init__(self, created: llm.GenerationCreatedEvent) -> None:
        self.response_id = created.response_id
        self.message_id = ""
        self.text, self.sound = "", b""
        self.calls: list[llm.FunctionCall] = []
        self.task = asyncio.create_task(self._read(created))

    async def _read(self, created: llm.GenerationCreatedEvent) -> None:
        async for message in created.message_stream:
            self.message_id = message.message_id
            await asyncio.gather(self._read_text(message), self._read_sound(message))
        self.calls = [call async for call in created.function_stream]

    async def _read_text(self, message: llm.MessageGeneration) -> None:
        async for piece in message.text_stream:
            self.text += str(piece)

    async def _read_sound(self, message: llm.MessageGeneration) -> None:
        async for frame in message.audio_stream:
            self.sound += bytes(frame.data)


class Talk:
    """A session, its answers, and a microphone that is on. Speech interrupts as it does in an agent's session."""

    def __init__(self, session: Any, http: aiohttp.ClientSession) -> None:
        self.session, self.http = session, http
        self.mic: Microphone
        self.said: list[Said] = []
        self.usages: list[Any] = []
        self.raw: list[Any] = []
        self.errors: list[str] = []
        self.reconnected = False
        session.on("generation_created", lambda created: self.said.append(Said(created)))
        session.on("metrics_collected", self._count)
        session.on("openai_server_event_received", self.raw.append)
        session.on("error", lambda error: self.errors.append(repr(error.error)))
        session.on("session_reconnected", lambda _: setattr(self, "reconnected", True))
        session.on("input_speech_started", lambda _: self._interrupt())

    def _count(self, metrics: Any) -> None:
        if isinstance(metrics, RealtimeModelMetrics) and metrics.request_id:  # a connection has some, too
            self.usages.append(metrics)

    def _interrupt(self) -> None:
        if self.said and not self.said[-1].task.done():
            self.session.interrupt()
            message_id = self.said[-1].message_id
            self.session.truncate(message_id=message_id, modalities=["audio", "text"], audio_end_ms=PLAYED_MS)

    async def answer(self, number: int) -> Said:
        """The answer of that number, once it has ended."""
        await until(lambda: len(self.said) > number and self.said[number].task.done())
        self.said[number].task.result()
        return self.said[number]


@asynccontextmanager
async def talk(most_tokens: int) -> AsyncIterator[Talk]:
    async with aiohttp.ClientSession() as http:
        model = openai.realtime.RealtimeModel(model=MODEL, base_url=URL, api_key=KEY, http_session=http)
        model.update_options(max_response_output_tokens=most_tokens)
        it = Talk(model.session(), http)

        async def send(sound: bytes) -> None:
            it.session.push_audio(rtc.AudioFrame(sound, RATE_HZ, 1, len(sound) // 2))

        await it.session.update_instructions("Be brief.")
        try:
            async with microphone(send) as it.mic:
                yield it
        finally:
            await it.session.aclose()
            await model.aclose()


def usage_of(metrics: Any) -> dict[str, int]:
    return {
        "text in": metrics.input_token_details.text_tokens,
        "sound in": metrics.input_token_details.audio_tokens,
        "text out": metrics.output_token_details.text_tokens,
    }


async def turns() -> None:
    async with talk(MAX_TOKENS) as it:
        with doing("spoken turn") as seen:
            it.mic.say(FIRST)
            first = await it.answer(0)
            seen |= {"text": first.text, "file": kept("spoken.pcm", first.sound), "errors": it.errors}
        with doing("second turn") as seen:
            it.mic.say(SECOND)
            second = await it.answer(1)
            await until(lambda: len(it.usages) == 2)
            one, two = map(usage_of, it.usages)
            seen |= {"text": second.text, "first": one, "second": two, "errors": it.errors}
            history = {item.id: item for item in it.session.chat_ctx.items}
            answers = [history[each.message_id].text_content for each in (first, second)]
            users = [item for item in history.values() if item.role == "user"]
            seen["kept"] = answers == [first.text, second.text] and len(users) == 2


async def interruption() -> None:
    async with talk(LONG_TOKENS) as it:
        with doing("interruption") as seen:
            it.mic.say(FIRST)
            await until(lambda: it.said and it.said[0].sound)
            it.mic.say(SECOND)
            await it.answer(0)
            later = await it.answer(1)
            await until(lambda: any(event["type"] == "conversation.item.truncated" for event in it.raw))
            ends = [place for place, event in enumerate(it.raw) if event["type"] == "response.done"]
            done = it.raw[ends[0]]["response"]
            late = [each["type"] for each in it.raw[ends[0] + 1 :] if each.get("response_id") == done["id"]]
            seen |= {"status": done["status"], "reason": done["status_details"]["reason"], "late": late}
            seen |= {"text": later.text, "errors": it.errors}


async def tool() -> None:
    async with talk(MAX_OBJECT_TOKENS) as it:
        with doing("tool") as seen:
            await it.session.update_tools([set_lamp])
            it.session.update_options(tool_choice={"type": "function", "function": {"name": "set_lamp"}})
            it.mic.say(FIRST)
            (call,) = (await it.answer(0)).calls
            context = it.session.chat_ctx.copy()
            context.insert(
                llm.FunctionCallOutput(call_id=call.call_id, name=call.name, output=TOOL_RESULT, is_error=False)
            )
            await it.session.update_chat_ctx(context)
            it.session.update_options(max_response_output_tokens=MAX_TOKENS)
            await it.session.generate_reply(tool_choice="none")
            text = (await it.answer(1)).text
            seen |= {"name": call.name, "arguments": json.loads(call.arguments), "text": text, "errors": it.errors}


async def dropped_connection() -> None:
    """It connects again by itself."""
    with doing("dropped connection") as seen:
        before = await cancelled()
        async with talk(LONG_TOKENS) as it:
            it.mic.say(FIRST)
            await until(lambda: it.said and it.said[0].text)
            seen["errors"] = list(it.errors)
            (protocol,) = it.http.connector._acquired
            protocol.transport.abort()
            await until(lambda: it.reconnected)
            it.session.update_options(max_response_output_tokens=MAX_TOKENS)
            await it.session.generate_reply(instructions="Go on.")
            seen["text"] = (await it.answer(1)).text
        await no_session_is_open()
        seen["cancelled"] = await cancelled() - before


async def main() -> None:
    await turns()
    await interruption()
    await tool()
    await dropped_connection()


asyncio.run(main())
