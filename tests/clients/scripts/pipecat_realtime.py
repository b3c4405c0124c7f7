"""Pipecat's OpenAI realtime service in a pipeline with its context aggregators, as its own example has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pipecat.adapters.llm.schemas.function_schema import FunctionSchema
from pipecat.adapters.llm.schemas.tools_schema import ToolsSchema
from pipecat.frames.frames import (
    Frame,
    InputAudioRawFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMRunFrame,
    LLMUpdateSettingsFrame,
    TTSAudioRawFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.llm_service import FunctionCallParams
from pipecat.services.openai.realtime import events
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner
from spoken import (
    FIRST,
    LONG_TOKENS,
    RATE_HZ,
    SECOND,
    Microphone,
    cancelled,
    microphone,
    no_session_is_open,
    played,
    until,
)
from told import (
    ADDRESS,
    KEY,
    LAMP_SCHEMA,
    MAX_OBJECT_TOKENS,
    MAX_TOKENS,
    MODEL,
    QUESTION,
    TOOL_RESULT,
    doing,
    kept,
)

WS_URL = f"{ADDRESS.replace('http', 'ws', 1)}/v1/realtime"
LAMP = FunctionSchema("set_lamp", "Sets the lamp.", LAMP_SCHEMA["properties"], LAMP_SCHEMA["required"])
READ: list[Any] = []
"""The server's events as the service reads them: it hands on no responses' states."""
parse = events.parse_server_event


def parse_and_note(message: str) -> Any:
    event = parse(message)
    READ.append(event)
    return event


events.parse_server_event = parse_and_note


class Listener(FrameProcessor):
    """Keeps what the service says, in the place of a transport's output."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Frame] = []

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if direction == FrameDirection.DOWNSTREAM:
            self.frames.append(frame)
        await self.push_frame(frame, direction)


class Talk:
    """A pipeline that runs, and a microphone that is on."""

    def __init__(self, llm: OpenAIRealtimeLLMService, context: LLMContext, listener: Listener) -> None:
        self.llm, self.context, self._listener = llm, context, listener
        self.mic: Microphone
        self.errors: list[str] = []

    def of(self, kind: type[Frame], since: int = 0) -> list[Any]:
        return [frame for frame in self._listener.frames[since:] if isinstance(frame, kind)]

    @property
    def frames(self) -> int:
        return len(self._listener.frames)

    def text(self, since: int = 0) -> str:
        return "".join(frame.text for frame in self.of(TTSTextFrame, since))


def read(kind: str, since: int = 0) -> list[Any]:
    return [event for event in READ[since:] if event is not None and event.type == kind]


def properties(**session: Any) -> events.SessionProperties:
    sound = events.AudioInput(
        transcription=events.InputAudioTranscription(),
        turn_detection=events.SemanticTurnDetection(),
        noise_reduction=events.InputAudioNoiseReduction(type="near_field"),
    )
    return events.SessionProperties(audio=events.AudioConfiguration(input=sound), instructions="Be brief.", **session)


@asynccontextmanager
async def talk(tools: ToolsSchema | None = None, **session: Any) -> AsyncIterator[Talk]:
    READ.clear()
    settings = OpenAIRealtimeLLMService.Settings(model=MODEL, session_properties=properties(**session))
    llm = OpenAIRealtimeLLMService(api_key=KEY, base_url=WS_URL, settings=settings)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    context = LLMContext(messages) if tools is None else LLMContext(messages, tools)
    both = LLMContextAggregatorPair(context)
    listener = Listener()
    worker = PipelineWorker(Pipeline([both.user(), llm, listener, both.assistant()]))
    it = Talk(llm, context, listener)
    started = asyncio.Event()
    worker.add_event_handler("on_pipeline_started", lambda *_: started.set())
    worker.add_event_handler("on_pipeline_error", lambda _, frame: it.errors.append(frame.error))
    runner = WorkerRunner()
    await runner.add_workers(worker)
    runs = asyncio.create_task(runner.run())
    await started.wait()

    async def send(sound: bytes) -> None:
        await worker.queue_frame(InputAudioRawFrame(sound, RATE_HZ, 1))

    try:
        async with microphone(send) as it.mic:
            await worker.queue_frame(LLMRunFrame())
            yield it
    finally:
        await worker.cancel()
        await runs


def usage_of(event: Any) -> dict[str, int]:
    usage = event.response.usage
    return {
        "text in": usage.input_token_details.text_tokens,
        "sound in": usage.input_token_details.audio_tokens,
        "text out": usage.output_token_details.text_tokens,
    }


async def turns() -> None:
    async with talk(max_output_tokens=MAX_TOKENS) as it:
        with doing("spoken turn") as seen:
            await until(lambda: it.of(LLMFullResponseEndFrame))
            since = it.frames
            it.mic.say(FIRST)
            await until(lambda: it.of(LLMFullResponseEndFrame, since))
            first, sound = it.text(since), b"".join(frame.audio for frame in it.of(TTSAudioRawFrame, since))
            seen |= {"text": first, "file": kept("spoken.pcm", sound), "errors": it.errors}
        await played(sound)
        with doing("second turn") as seen:
            since = it.frames
            it.mic.say(SECOND)
            await until(lambda: it.of(LLMFullResponseEndFrame, since))
            _, one, two = map(usage_of, read("response.done"))
            seen |= {"text": it.text(since), "first": one, "second": two, "errors": it.errors}
            said = [str(message["content"]) for message in it.context.get_messages() if message["role"] == "assistant"]
            seen["kept"] = any(first.strip() in each for each in said)


async def interruption() -> None:
    async with talk(max_output_tokens=LONG_TOKENS) as it:
        with doing("interruption") as seen:
            await until(lambda: it.of(TTSAudioRawFrame))
            it.mic.say(FIRST)
            await until(lambda: it.of(InterruptionFrame))
            await until(lambda: read("response.done"))
            since, response = it.frames, read("response.done")[0].response
            place = len(READ)
            await until(lambda: len(read("response.done")) == 2 and it.text(since))
            deltas = read("response.output_audio_transcript.delta", place)
            late = [event.delta for event in deltas if event.response_id == response.id]
            seen |= {"status": response.status, "reason": response.status_details["reason"], "late": late}
            seen |= {"text": it.text(since), "errors": it.errors}


async def tool() -> None:
    with doing("tool") as seen:

        async def set_lamp(params: FunctionCallParams) -> None:
            seen.update(name=params.function_name, arguments=dict(params.arguments))
            # Or it would be called by the answer to its result too.
            changed = properties(tool_choice="none", max_output_tokens=MAX_TOKENS)
            delta = OpenAIRealtimeLLMService.Settings(session_properties=changed)
            updates = len(read("session.updated"))
            await params.llm.queue_frame(LLMUpdateSettingsFrame(delta=delta))
            await until(lambda: len(read("session.updated")) > updates)
            await params.result_callback(TOOL_RESULT)

        async with talk(
            ToolsSchema(standard_tools=[LAMP]), tool_choice="required", max_output_tokens=MAX_OBJECT_TOKENS
        ) as it:
            it.llm.register_function("set_lamp", set_lamp)
            await until(lambda: len(read("response.done")) == 2 and it.text())
            seen |= {"text": it.text(), "errors": it.errors}


async def dropped_connection() -> None:
    with doing("dropped connection") as seen:
        before = await cancelled()
        async with talk(max_output_tokens=LONG_TOKENS) as it:
            await until(lambda: it.of(TTSTextFrame))
            it.llm._websocket.transport.abort()
            await no_session_is_open()
        seen["cancelled"] = await cancelled() - before
        async with talk(max_output_tokens=MAX_TOKENS) as it:
            await until(lambda: it.of(LLMFullResponseEndFrame))
            seen |= {"text": it.text(), "errors": it.errors}


async def main() -> None:
    await turns()
    await interruption()
    await tool()
    await dropped_connection()


asyncio.run(main())
