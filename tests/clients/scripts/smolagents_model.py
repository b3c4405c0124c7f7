"""smolagents' model for OpenAI's API, by itself and with a tool."""

from __future__ import annotations

import json

from smolagents import ChatMessage, OpenAIModel, Tool
from told import (
    KEY,
    LAMP_SCHEMA,
    MAX_OBJECT_TOKENS,
    MAX_TOKENS,
    MODEL,
    QUESTION,
    SECOND_QUESTION,
    TOOL_RESULT,
    URL,
    doing,
)


class SetLamp(Tool):
    name = "set_lamp"
    description = "Sets the lamp."
    inputs = {  # noqa: RUF012
        "color": {"type": "string", "description": "Its color.", "enum": ["red", "green"]},
        "on": {"type": "boolean", "description": "Whether it is on."},
    }
    output_type = "string"

    def forward(self, color: str, on: bool) -> str:
        return TOOL_RESULT


model = OpenAIModel(MODEL, api_base=URL, api_key=KEY, max_tokens=MAX_TOKENS, temperature=0)
# A model that says nothing of sense calls until its length: one call is enough.
calls = OpenAIModel(
    MODEL, api_base=URL, api_key=KEY, max_tokens=MAX_OBJECT_TOKENS, temperature=0, parallel_tool_calls=False
)
USER = ChatMessage.from_dict({"role": "user", "content": [{"type": "text", "text": QUESTION}]})
SECOND_USER = ChatMessage.from_dict({"role": "user", "content": [{"type": "text", "text": SECOND_QUESTION}]})

with doing("chat") as seen:
    answer = model.generate([USER])
    seen |= {"text": answer.content, "tokens": answer.token_usage.output_tokens}

with doing("stream") as seen:
    seen["text"] = "".join(delta.content or "" for delta in model.generate_stream([USER]))

with doing("second turn") as seen:
    seen["text"] = model.generate([USER, model.generate([USER]), SECOND_USER]).content

with doing("tool") as seen:
    called = calls.generate([USER], tools_to_call_from=[SetLamp()])
    (call,) = called.tool_calls
    arguments = call.function.arguments
    seen |= {
        "name": call.function.name,
        "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments,
    }

with doing("structured") as seen:
    format = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": LAMP_SCHEMA, "strict": True}}
    seen["object"] = json.loads(calls.generate([USER], response_format=format).content)
