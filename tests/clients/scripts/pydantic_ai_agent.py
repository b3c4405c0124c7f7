"""pydantic-ai's agents, by OpenAI's chat API and by the responses API, which is its default."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, NativeOutput
from pydantic_ai.direct import model_request_sync
from pydantic_ai.messages import ModelRequest, ToolReturnPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition
from told import (
    LAMP_SCHEMA,
    MAX_OBJECT_TOKENS,
    MAX_TOKENS,
    MODEL,
    PNG,
    QUESTION,
    SECOND_QUESTION,
    TOOL,
    TOOL_RESULT,
    WAV,
    doing,
)

# Its provider takes address and key from OPENAI_BASE_URL and OPENAI_API_KEY.
short = ModelSettings(max_tokens=MAX_TOKENS, temperature=0)
long = ModelSettings(max_tokens=MAX_OBJECT_TOKENS, temperature=0)
agent = Agent(OpenAIChatModel(MODEL), model_settings=short)
default = Agent(f"openai:{MODEL}", model_settings=short)


class Lamp(BaseModel):
    """A lamp."""

    color: Literal["red", "green"]
    on: bool


def object_agent(output: Any, model: Any) -> Agent[None, Lamp]:
    return Agent(model, output_type=output, model_settings=long, retries=0)


with doing("chat") as seen:
    answer = agent.run_sync(QUESTION)
    seen |= {"text": answer.output, "tokens": answer.usage.output_tokens}

with doing("stream") as seen:
    with_stream = agent.run_stream_sync(QUESTION)
    seen["text"] = "".join(with_stream.stream_text(delta=True))

with doing("second turn") as seen:
    history = agent.run_sync(QUESTION).all_messages()
    seen["text"] = agent.run_sync(SECOND_QUESTION, message_history=history).output

with doing("image") as seen:
    seen["text"] = agent.run_sync([QUESTION, BinaryContent(PNG, media_type="image/png")]).output

with doing("sound in") as seen:
    seen["text"] = agent.run_sync([QUESTION, BinaryContent(WAV, media_type="audio/wav")]).output

with doing("structured") as seen:
    seen["object"] = object_agent(Lamp, OpenAIChatModel(MODEL)).run_sync(QUESTION).output.model_dump()

with doing("structured by a schema") as seen:
    seen["object"] = object_agent(NativeOutput(Lamp), OpenAIChatModel(MODEL)).run_sync(QUESTION).output.model_dump()

with doing("tool") as seen:
    # An agent lets the model choose; one request may ask for a call.
    tool = ToolDefinition(
        name="set_lamp", description=TOOL["function"]["description"], parameters_json_schema=LAMP_SCHEMA
    )
    parameters = ModelRequestParameters(function_tools=[tool])
    asks_for_a_call: ModelSettings = {**long, "tool_choice": "required", "parallel_tool_calls": False}
    question = ModelRequest.user_text_prompt(QUESTION)
    model = OpenAIChatModel(MODEL)
    called = model_request_sync(
        model,
        [question],
        model_settings=asks_for_a_call,
        model_request_parameters=parameters,
    )
    (call,) = called.tool_calls
    result = ModelRequest(
        parts=[ToolReturnPart(tool_name="set_lamp", content=TOOL_RESULT, tool_call_id=call.tool_call_id)]
    )
    last = model_request_sync(
        model, [question, called, result], model_settings=short, model_request_parameters=parameters
    )
    seen |= {"name": call.tool_name, "arguments": call.args_as_dict(), "text": last.text}

with doing("responses") as seen:
    seen["text"] = default.run_sync(QUESTION).output

with doing("responses stream") as seen:
    seen["text"] = "".join(default.run_stream_sync(QUESTION).stream_text(delta=True))

with doing("responses structured") as seen:
    seen["object"] = object_agent(Lamp, f"openai:{MODEL}").run_sync(QUESTION).output.model_dump()
