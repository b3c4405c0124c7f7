"""litellm as a library, by its `openai/` provider."""

from __future__ import annotations

import base64
import json
import os
from typing import Any

# Else it waits for prices from the internet.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from told import (
    FOLDER,
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
    WAV_BASE64,
    doing,
    kept,
)

AT: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY}
ASKED: dict[str, Any] = {**AT, "max_tokens": MAX_TOKENS, "temperature": 0}
USER = {"role": "user", "content": QUESTION}
TEXT_PART = {"type": "text", "text": QUESTION}
SOUND_PART = {"type": "input_audio", "input_audio": {"data": WAV_BASE64, "format": "wav"}}
PICTURE_PART = {"type": "image_url", "image_url": {"url": PNG_URL}}


def asked(messages: list[Any], **fields: Any) -> Any:
    return litellm.completion(messages=messages, **{**ASKED, **fields})


def text(answer: Any) -> str:
    return answer.choices[0].message.content


with doing("chat") as seen:
    answer = asked([USER])
    seen |= {"text": text(answer), "finish": answer.choices[0].finish_reason, "tokens": answer.usage.completion_tokens}

with doing("stream") as seen:
    seen["text"] = "".join(chunk.choices[0].delta.content or "" for chunk in asked([USER], stream=True))

with doing("second turn") as seen:
    first = asked([USER]).choices[0].message
    seen["text"] = text(asked([USER, first, {"role": "user", "content": SECOND_QUESTION}]))

with doing("image") as seen:
    seen["text"] = text(asked([{"role": "user", "content": [TEXT_PART, PICTURE_PART]}]))

with doing("sound in") as seen:
    seen["text"] = text(asked([{"role": "user", "content": [TEXT_PART, SOUND_PART]}]))

with doing("sound out") as seen:
    spoken = asked([USER], modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"})
    audio = spoken.choices[0].message.audio
    details = spoken.usage.completion_tokens_details
    seen |= {
        "file": kept("answer.wav", base64.b64decode(audio.data)),
        "text": audio.transcript,
        "all tokens": spoken.usage.completion_tokens,
        "audio tokens": details.audio_tokens,
    }

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

with doing("completions") as seen:
    made = litellm.text_completion(
        prompt=QUESTION, model=f"text-completion-openai/{MODEL}", api_base=URL, api_key=KEY, max_tokens=MAX_TOKENS,
        temperature=0,
    )  # fmt: skip
    seen["text"] = made.choices[0].text

with doing("transcription") as seen, (FOLDER / "question.wav").open("rb") as file:
    seen["text"] = litellm.transcription(file=file, **AT).text

with doing("speech") as seen:
    seen["file"] = kept("speech.mp3", litellm.speech(input=SAID, voice="alloy", **AT).content)

with doing("responses") as seen:
    made = litellm.responses(input=QUESTION, max_output_tokens=MAX_TOKENS, temperature=0, **AT)
    seen["text"] = made.output[0].content[0].text

with doing("too long") as seen:
    try:
        asked([{"role": "user", "content": "word " * 2000}])
    except litellm.ContextWindowExceededError as error:
        seen["message"] = str(error)
