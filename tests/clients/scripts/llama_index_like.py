"""LlamaIndex's OpenAILike: completions by default, chat where it is told so."""

from typing import Any, Literal

from llama_index.core.llms import AudioBlock, ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from told import (
    KEY,
    MAX_OBJECT_TOKENS,
    MAX_TOKENS,
    MODEL,
    PNG,
    QUESTION,
    SECOND_QUESTION,
    TOOL_RESULT,
    URL,
    WAV,
    doing,
)

AT: dict[str, Any] = {"model": MODEL, "api_base": URL, "api_key": KEY, "temperature": 0}
default = OpenAILike(max_tokens=MAX_TOKENS, **AT)
chat = OpenAILike(is_chat_model=True, max_tokens=MAX_TOKENS, **AT)
# A model that says nothing of sense calls until its length: one call is enough.
calls = OpenAILike(
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=MAX_OBJECT_TOKENS,
    additional_kwargs={"parallel_tool_calls": False},
    strict=True,  # else any object would do
    **AT,
)
USER = ChatMessage(role="user", content=QUESTION)


class Lamp(BaseModel):
    """A lamp."""

    color: Literal["red", "green"]
    on: bool


def set_lamp(color: Literal["red", "green"], on: bool) -> str:
    """Sets the lamp."""
    return TOOL_RESULT


def of_user(*blocks: Any) -> ChatMessage:
    return ChatMessage(role="user", blocks=[TextBlock(text=QUESTION), *blocks])


with doing("completions") as seen:
    seen["text"] = default.complete(QUESTION).text

with doing("chat") as seen:
    seen["text"] = chat.chat([USER]).message.content

with doing("stream") as seen:
    seen["text"] = "".join(piece.delta or "" for piece in chat.stream_chat([USER]))

with doing("second turn") as seen:
    first = chat.chat([USER]).message
    seen["text"] = chat.chat([USER, first, ChatMessage(role="user", content=SECOND_QUESTION)]).message.content

with doing("image") as seen:
    seen["text"] = chat.chat([of_user(ImageBlock(image=PNG, image_mimetype="image/png"))]).message.content

with doing("sound in") as seen:
    seen["text"] = chat.chat([of_user(AudioBlock(audio=WAV, format="wav"))]).message.content

with doing("tool") as seen:
    tool = FunctionTool.from_defaults(set_lamp)
    answer = calls.chat_with_tools([tool], user_msg=QUESTION, tool_choice="set_lamp")
    (call,) = calls.get_tool_calls_from_response(answer)
    result = ChatMessage(role="tool", content=TOOL_RESULT, additional_kwargs={"tool_call_id": call.tool_id})
    last = chat.chat([USER, answer.message, result])
    seen |= {"name": call.tool_name, "arguments": call.tool_kwargs, "text": last.message.content}

with doing("structured") as seen:
    seen["object"] = calls.as_structured_llm(Lamp).complete(QUESTION).raw.model_dump()
