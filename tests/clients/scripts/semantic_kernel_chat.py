"""Semantic Kernel's chat, sound and speech services for OpenAI."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIAudioToText,
    OpenAIAudioToTextExecutionSettings,
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextToAudio,
    OpenAITextToAudioExecutionSettings,
)
from semantic_kernel.contents import AudioContent, ChatHistory, ChatMessageContent, ImageContent, TextContent
from semantic_kernel.functions import kernel_function
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
    kept,
)

client = AsyncOpenAI(base_url=URL, api_key=KEY)
chat = OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)
short = OpenAIChatPromptExecutionSettings(max_tokens=MAX_TOKENS, temperature=0)


class Lamp(BaseModel):
    color: Literal["red", "green"]
    on: bool


def question() -> ChatHistory:
    history = ChatHistory()
    history.add_user_message(QUESTION)
    return history


async def main() -> None:
    with doing("chat") as seen:
        seen["text"] = (await chat.get_chat_message_content(question(), short)).content
    with doing("stream") as seen:
        pieces = [str(piece) async for piece in chat.get_streaming_chat_message_content(question(), short)]
        seen["text"] = "".join(pieces)
    with doing("second turn") as seen:
        history = question()
        history.add_message(await chat.get_chat_message_content(history, short))
        history.add_user_message(SECOND_QUESTION)
        seen["text"] = (await chat.get_chat_message_content(history, short)).content
    with doing("image") as seen:
        history = ChatHistory()
        history.add_message(
            ChatMessageContent(role="user", items=[TextContent(text=QUESTION), ImageContent(data_uri=PNG_URL)])
        )
        seen["text"] = (await chat.get_chat_message_content(history, short)).content
    with doing("structured") as seen:
        typed = OpenAIChatPromptExecutionSettings(max_tokens=MAX_OBJECT_TOKENS, temperature=0, response_format=Lamp)
        answer = await chat.get_chat_message_content(question(), typed)
        seen["object"] = Lamp.model_validate_json(answer.content).model_dump()
    with doing("switch") as seen:
        await call_a_tool(seen)
    with doing("transcription") as seen:
        service = OpenAIAudioToText(ai_model_id=MODEL, async_client=client)
        sound = AudioContent(uri=str(FOLDER / "question.wav"))
        seen["text"] = (await service.get_text_content(sound, OpenAIAudioToTextExecutionSettings())).text
    with doing("speech") as seen:
        speaker = OpenAITextToAudio(ai_model_id=MODEL, async_client=client)
        said = await speaker.get_audio_content(SAID, OpenAITextToAudioExecutionSettings(voice="alloy"))
        seen["file"] = kept("speech.mp3", said.data)


async def call_a_tool(seen: dict[str, Any]) -> None:
    class Lamps:
        @kernel_function(name="set_lamp", description="Sets the lamp.")
        def set_lamp(self, on: Annotated[bool, "Whether it is on"]) -> str:
            seen.update(name="set_lamp", arguments={"on": on})
            return TOOL_RESULT

    kernel = Kernel()
    kernel.add_plugin(Lamps(), plugin_name="lamps")
    settings = OpenAIChatPromptExecutionSettings(max_tokens=MAX_OBJECT_TOKENS, temperature=0)
    settings.parallel_tool_calls = False
    settings.function_choice_behavior = FunctionChoiceBehavior.Required(auto_invoke=True)
    answer = await chat.get_chat_message_content(question(), settings, kernel=kernel)
    seen["text"] = answer.content


asyncio.run(main())
