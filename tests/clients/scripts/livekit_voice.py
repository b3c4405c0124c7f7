"""LiveKit's OpenAI plugins for a language model, speech to text and text to speech."""

from __future__ import annotations

import asyncio
import json
import wave
from typing import Any, Literal

from livekit import rtc
from livekit.agents import llm
from livekit.agents.llm import ChatContext, ImageContent, function_tool
from livekit.agents.utils import http_context
from livekit.plugins import openai
from told import (
    FOLDER,
    KEY,
    MAX_OBJECT_TOKENS,
    MAX_TOKENS,
    MODEL,
    PNG_URL,
    QUESTION,
    SAID,
    SECOND_QUESTION,
    TOOL_RESULT,
    URL,
    doing,
)

AT: dict[str, Any] = {"model": MODEL, "base_url": URL, "api_key": KEY}
model = openai.LLM(**AT, temperature=0, max_completion_tokens=MAX_TOKENS)
calls = openai.LLM(**AT, temperature=0, max_completion_tokens=MAX_OBJECT_TOKENS)


@function_tool
async def set_lamp(color: Literal["red", "green"], on: bool) -> str:
    """Sets the lamp."""
    return TOOL_RESULT


def question(*more: Any) -> ChatContext:
    context = ChatContext.empty()
    context.add_message(role="user", content=[QUESTION, *more])
    return context


async def asked(context: ChatContext, by: openai.LLM = model, **options: Any) -> llm.CollectedResponse:
    return await by.chat(chat_ctx=context, **options).collect()


async def main() -> None:
    with doing("stream") as seen:
        seen["text"] = (await asked(question())).text
    with doing("second turn") as seen:
        context = question()
        context.add_message(role="assistant", content=(await asked(context)).text)
        context.add_message(role="user", content=SECOND_QUESTION)
        seen["text"] = (await asked(context)).text
    with doing("image") as seen:
        seen["text"] = (await asked(question(ImageContent(image=PNG_URL)))).text
    with doing("tool") as seen:
        context = question()
        named = {"type": "function", "function": {"name": "set_lamp"}}
        (call,) = (await asked(context, calls, tools=[set_lamp], tool_choice=named)).tool_calls
        context.insert(llm.FunctionCall(call_id=call.call_id, name=call.name, arguments=call.arguments))
        context.insert(llm.FunctionCallOutput(call_id=call.call_id, name=call.name, output=TOOL_RESULT, is_error=False))
        last = await asked(context, tools=[set_lamp])
        seen |= {"name": call.name, "arguments": json.loads(call.arguments), "text": last.text}
    with doing("speech") as seen:
        pieces = [event.frame async for event in openai.TTS(**AT).synthesize(SAID)]
        (FOLDER / "speech.wav").write_bytes(rtc.combine_audio_frames(pieces).to_wav_bytes())
        seen |= {"file": "speech.wav", "was": "mp3"}
    with doing("English transcription") as seen:
        with wave.open(str(FOLDER / "question.wav")) as file:
            num_samples, rate_hz = file.getnframes(), file.getframerate()
            sound = rtc.AudioFrame(file.readframes(num_samples), rate_hz, 1, num_samples)
        heard = await openai.STT(**AT).recognize(sound)
        seen["text"] = heard.alternatives[0].text


async def in_a_session() -> None:
    http_context._new_session_ctx()
    try:
        await main()
    finally:
        await http_context._close_http_ctx()


asyncio.run(in_a_session())
