"""openai-agents: the chat model, the responses API (its default), and the voice pipeline with its own settings."""

from __future__ import annotations

import asyncio
import wave
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.voice import (
    AudioInput,
    OpenAIVoiceModelProvider,
    SingleAgentVoiceWorkflow,
    STTModelSettings,
    VoicePipeline,
    VoicePipelineConfig,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from told import (
    FOLDER,
    KEY,
    MAX_OBJECT_TOKENS,
    MAX_TOKENS,
    MODEL,
    PNG_URL,
    QUESTION,
    SECOND_QUESTION,
    TOOL_RESULT,
    URL,
    doing,
    kept,
)

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=URL, api_key=KEY)
chat = OpenAIChatCompletionsModel(MODEL, client)
responses = OpenAIResponsesModel(MODEL, client)
ToolUse = Literal["run_llm_again", "stop_on_first_tool"]
short = ModelSettings(max_tokens=MAX_TOKENS, temperature=0)
long = ModelSettings(max_tokens=MAX_OBJECT_TOKENS, temperature=0)


class Lamp(BaseModel):
    color: Literal["red", "green"]
    on: bool


def said_by(model: Any, stop: str | None) -> Agent:
    """With `stop`, for the runner raises at a response that ends at its length."""
    settings = short if stop is None else replace(short, extra_body={"stop": [stop]})
    return Agent(name="assistant", model=model, model_settings=settings)


async def ask(model: Any, prefix: str, earlier: dict[str, str]) -> dict[str, str]:
    """`earlier`: what the chat model said of each thing, of which the end is where the responses API is to stop."""
    said: dict[str, str] = {}
    stops = {did: text[-3:] for did, text in earlier.items()}
    question = [{"type": "input_text", "text": QUESTION}]
    picture = [*question, {"type": "input_image", "image_url": PNG_URL, "detail": "auto"}]
    for did, content in (("", question), ("image", picture)):
        with doing(f"{prefix}{did}".strip() or "chat") as seen:
            agent = said_by(model, stops.get(did))
            run = await Runner.run(agent, [{"role": "user", "content": content}])
            said[did] = run.final_output
            seen |= {"text": said[did], "stop": stops.get(did)}
    with doing(f"{prefix}stream") as seen:
        run = Runner.run_streamed(said_by(model, stops.get("")), QUESTION)
        raw = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
        pieces = [event.delta for event in raw if event.type == "response.output_text.delta"]
        seen |= {"text": "".join(pieces), "whole": run.final_output, "stop": stops.get("")}
    with doing(f"{prefix}structured") as seen:
        typed = Agent(name="assistant", model=model, model_settings=long, output_type=Lamp)
        seen["object"] = (await Runner.run(typed, QUESTION)).final_output.model_dump()
    return said


async def converse(model: Any) -> None:
    with doing("second turn") as seen:
        agent = said_by(model, None)
        turns = (await Runner.run(agent, QUESTION)).to_input_list()
        turns.append({"role": "user", "content": SECOND_QUESTION})
        seen["text"] = (await Runner.run(agent, turns)).final_output


async def call_a_tool(model: Any, did: str, ends: ToolUse) -> None:
    """The runner's loop: the call that is asked for, the tool, and the answer to its result where it does not end."""
    with doing(did) as seen:

        @function_tool
        def set_lamp(color: Literal["red", "green"], on: bool) -> str:
            """Sets the lamp."""
            seen.update(name="set_lamp", arguments={"color": color, "on": on})
            return TOOL_RESULT

        settings = replace(long, tool_choice="set_lamp")
        agent = Agent(name="assistant", model=model, model_settings=settings, tools=[set_lamp], tool_use_behavior=ends)
        seen["text"] = (await Runner.run(agent, QUESTION, max_turns=2)).final_output


async def speak() -> None:
    agent = Agent(name="assistant", model=chat, model_settings=short)
    provider = OpenAIVoiceModelProvider(openai_client=client)
    pipeline = VoicePipeline(
        workflow=SingleAgentVoiceWorkflow(agent),
        stt_model=MODEL,
        tts_model=MODEL,
        config=VoicePipelineConfig(model_provider=provider, tracing_disabled=True),
    )
    with wave.open(str(FOLDER / "question.wav")) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        sound = AudioInput(buffer=samples, frame_rate=file.getframerate())
    with doing("transcription") as seen:
        seen["text"] = await provider.get_stt_model(MODEL).transcribe(sound, STTModelSettings(), False, False)
    with doing("voice") as seen:
        result = await pipeline.run(sound)
        pieces = []
        async for event in result.stream():
            if event.type == "voice_stream_event_audio":
                pieces.append(event.data)
            elif event.type == "voice_stream_event_error":
                raise event.error
        seen["file"] = kept("voice.pcm", np.concatenate(pieces).astype("<i2").tobytes())


async def main() -> None:
    said = await ask(chat, "", {})
    await converse(chat)
    await call_a_tool(chat, "tool", "run_llm_again")
    await ask(responses, "responses ", said)
    await call_a_tool(responses, "responses tool", "stop_on_first_tool")
    await speak()


asyncio.run(main())
