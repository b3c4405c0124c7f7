"""langchain-openai's chat model."""

from __future__ import annotations

import base64
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from told import (
    KEY,
    MAX_OBJECT_TOKENS,
    MAX_TOKENS,
    MODEL,
    PNG_URL,
    QUESTION,
    SECOND_QUESTION,
    TOOL_RESULT,
    URL,
    WAV_BASE64,
    doing,
    kept,
)

AT: dict[str, Any] = {"base_url": URL, "api_key": KEY, "model": MODEL, "temperature": 0}
model = ChatOpenAI(max_tokens=MAX_TOKENS, **AT)
objects = ChatOpenAI(max_tokens=MAX_OBJECT_TOKENS, **AT)
TEXT_PART = {"type": "text", "text": QUESTION}


class Lamp(BaseModel):
    """A lamp."""

    color: Literal["red", "green"]
    on: bool


@tool
def set_lamp(color: Literal["red", "green"], on: bool) -> str:
    """Sets the lamp."""
    return TOOL_RESULT


with doing("chat") as seen:
    answer = model.invoke(QUESTION)
    seen |= {"text": answer.content, "tokens": answer.usage_metadata["output_tokens"]}

with doing("stream") as seen:
    seen["text"] = "".join(chunk.content for chunk in model.stream(QUESTION))

with doing("second turn") as seen:
    messages = [HumanMessage(QUESTION), model.invoke(QUESTION), HumanMessage(SECOND_QUESTION)]
    seen["text"] = model.invoke(messages).content

with doing("image") as seen:
    picture = {"type": "image_url", "image_url": {"url": PNG_URL}}
    seen["text"] = model.invoke([HumanMessage([TEXT_PART, picture])]).content

with doing("sound in") as seen:
    sound = {"type": "audio", "base64": WAV_BASE64, "mime_type": "audio/wav"}
    seen["text"] = model.invoke([HumanMessage([TEXT_PART, sound])]).content

with doing("sound out") as seen:
    speaks = ChatOpenAI(
        max_tokens=MAX_TOKENS,
        model_kwargs={"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}},
        **AT,
    )
    spoken = speaks.invoke(QUESTION)
    audio = spoken.additional_kwargs["audio"]
    seen |= {"file": kept("answer.wav", base64.b64decode(audio["data"])), "text": audio["transcript"]}

with doing("spoken second turn") as seen:
    seen["text"] = model.invoke([HumanMessage(QUESTION), spoken, HumanMessage(SECOND_QUESTION)]).content

with doing("tool") as seen:
    called = objects.bind_tools([set_lamp], tool_choice="set_lamp").invoke(QUESTION)
    (call,) = called.tool_calls
    result = ToolMessage(set_lamp.invoke(call["args"]), tool_call_id=call["id"])
    last = model.bind_tools([set_lamp]).invoke([HumanMessage(QUESTION), called, result])
    seen |= {"name": call["name"], "arguments": call["args"], "text": last.content}

with doing("structured") as seen:
    seen["object"] = objects.with_structured_output(Lamp).invoke(QUESTION).model_dump()

with doing("structured by a tool") as seen:
    seen["object"] = objects.with_structured_output(Lamp, method="function_calling").invoke(QUESTION).model_dump()

with doing("responses") as seen:
    answer = ChatOpenAI(max_tokens=MAX_TOKENS, use_responses_api=True, **AT).invoke(QUESTION)
    seen["text"] = answer.text if isinstance(answer.text, str) else answer.text()
