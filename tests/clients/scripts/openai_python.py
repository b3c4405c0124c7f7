"""OpenAI's own client in Python, versions 1, 2 and 3."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any, Literal

import openai
from openai import OpenAI
from pydantic import BaseModel
from told import (
    ADDRESS,
    KEY,
    LAMP_SCHEMA,
    MAX_OBJECT_TOKENS,
    MAX_TOKENS,
    MODEL,
    PNG_URL,
    QUESTION,
    SAID,
    SECOND_QUESTION,
    TOOL,
    TOOL_RESULT,
    URL,
    WAV,
    WAV_BASE64,
    doing,
    kept,
)

PAGE = Path(__file__).parents[3] / "docs" / "use" / "chat.md"
client = OpenAI(base_url=URL, api_key=KEY)
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": MAX_TOKENS, "temperature": 0}
SPOKEN: dict[str, Any] = {"modalities": ["text", "audio"], "seed": 3}
USER = {"role": "user", "content": QUESTION}
SECOND_USER = {"role": "user", "content": SECOND_QUESTION}
TEXT_PART = {"type": "text", "text": QUESTION}
SOUND_PART = {"type": "input_audio", "input_audio": {"data": WAV_BASE64, "format": "wav"}}
PICTURE_PART = {"type": "image_url", "image_url": {"url": PNG_URL}}


class Lamp(BaseModel):
    color: Literal["red", "green"]
    on: bool


def asked(messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(messages=messages, **{**ASKED, **fields})


def text(answer: Any) -> str:
    return answer.choices[0].message.content


with doing("models") as seen:
    seen["ids"] = [model.id for model in client.models.list()]

with doing("chat") as seen:
    answer = asked([USER])
    seen |= {"text": text(answer), "finish": answer.choices[0].finish_reason, "tokens": answer.usage.completion_tokens}

with doing("stream") as seen:
    chunks = list(asked([USER], stream=True, stream_options={"include_usage": True}))
    seen["text"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    seen["tokens"] = chunks[-1].usage.completion_tokens

with doing("second turn") as seen:
    first = asked([USER]).choices[0].message
    seen["text"] = text(asked([USER, first, SECOND_USER]))

with doing("image") as seen:
    seen["text"] = text(asked([{"role": "user", "content": [TEXT_PART, PICTURE_PART]}]))

with doing("sound in") as seen:
    seen["text"] = text(asked([{"role": "user", "content": [TEXT_PART, SOUND_PART]}]))

with doing("developer") as seen:
    seen["text"] = text(asked([{"role": "developer", "content": "Be brief."}, USER]))

with doing("sound out") as seen:
    spoken = asked([USER], **SPOKEN, audio={"voice": "alloy", "format": "wav"}).choices[0].message
    seen |= {"file": kept("answer.wav", base64.b64decode(spoken.audio.data)), "text": spoken.audio.transcript}

with doing("spoken second turn") as seen:
    seen["text"] = text(asked([USER, spoken, SECOND_USER]))

with doing("streamed sound") as seen:
    # Its helper raises at an answer that ends at its length.
    chunks = asked([USER], stream=True, **SPOKEN, audio={"voice": "alloy", "format": "pcm16"})
    deltas = [chunk.choices[0].delta.to_dict() for chunk in chunks if chunk.choices]
    pieces = [delta["audio"] for delta in deltas if delta.get("audio")]
    data = b"".join(base64.b64decode(piece.get("data") or "") for piece in pieces)
    seen |= {
        "file": kept("streamed.pcm", data),
        "ids": [piece["id"] for piece in pieces if piece.get("id")],
        "text": "".join(delta.get("content") or "" for delta in deltas),
    }

with doing("program of the page") as seen, contextlib.redirect_stdout(sys.stderr):
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    code = code.replace("http://127.0.0.1:8000", ADDRESS).replace("preset:toy", MODEL)
    exec(compile(code, str(PAGE), "exec"), {})
    seen["file"] = "answer.wav"

with doing("tool") as seen:
    named = {"type": "function", "function": {"name": "set_lamp"}}
    message = asked([USER], tools=[TOOL], tool_choice=named, max_tokens=MAX_OBJECT_TOKENS).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": TOOL_RESULT}
    last = asked([USER, message, result], tools=[TOOL])
    seen |= {"name": call.function.name, "arguments": json.loads(call.function.arguments), "text": text(last)}

with doing("structured") as seen:
    format = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": LAMP_SCHEMA, "strict": True}}
    seen["object"] = json.loads(text(asked([USER], response_format=format, max_tokens=MAX_OBJECT_TOKENS)))

with doing("parse") as seen:
    parsed = client.chat.completions.parse(
        messages=[USER], response_format=Lamp, **{**ASKED, "max_tokens": MAX_OBJECT_TOKENS}
    )
    seen["object"] = parsed.choices[0].message.parsed.model_dump()

with doing("completions") as seen:
    seen["text"] = client.completions.create(prompt=QUESTION, **ASKED).choices[0].text

with doing("transcription") as seen:
    seen["text"] = client.audio.transcriptions.create(model=MODEL, file=("question.wav", WAV)).text

with doing("translation") as seen:
    seen["text"] = client.audio.translations.create(model=MODEL, file=("question.wav", WAV)).text

with doing("speech") as seen:
    said = client.audio.speech.create(model=MODEL, input=SAID, voice="alloy")
    seen["file"] = kept("speech.mp3", said.content)

with doing("responses") as seen:
    made = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=MAX_TOKENS, temperature=0)
    seen |= {"text": made.output_text, "tokens": made.usage.output_tokens}

with doing("responses stream") as seen:
    # Its helper raises at a response that ends at its length.
    events = list(
        client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=MAX_TOKENS, temperature=0, stream=True)
    )
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    seen |= {"text": "".join(deltas), "whole": events[-1].response.output_text}

with doing("responses second turn") as seen:
    made = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=MAX_TOKENS, temperature=0)
    turns = [USER, *[item.to_dict() for item in made.output], SECOND_USER]
    seen["text"] = client.responses.create(
        model=MODEL, input=turns, max_output_tokens=MAX_TOKENS, temperature=0
    ).output_text

with doing("responses tool") as seen:
    tool = {"type": "function", **TOOL["function"], "strict": True}
    named = {"type": "function", "name": "set_lamp"}
    fields: dict[str, Any] = {"model": MODEL, "tools": [tool], "temperature": 0}
    made = client.responses.create(input=QUESTION, tool_choice=named, max_output_tokens=MAX_OBJECT_TOKENS, **fields)
    (call,) = [item for item in made.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": TOOL_RESULT}
    turns = [USER, *[item.to_dict() for item in made.output], result]
    last = client.responses.create(input=turns, max_output_tokens=MAX_TOKENS, **fields)
    seen |= {"name": call.name, "arguments": json.loads(call.arguments), "text": last.output_text}

with doing("refused") as seen:
    try:
        asked([USER], temperature=9)
    except openai.BadRequestError as error:
        seen |= {"param": error.param, "message": error.message}
