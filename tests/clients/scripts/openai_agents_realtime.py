"""openai-agents: realtime sessions with all of their defaults, such as semantic turn detection and transcription."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from agents import function_tool, set_tracing_disabled
from agents.realtime import RealtimeAgent, RealtimeModelSendSessionUpdate, RealtimeRunner, RealtimeSession
from spoken import FIRST, LONG_TOKENS, SECOND, Microphone, cancelled, microphone, no_session_is_open, played, until
from told import ADDRESS, KEY, MAX_OBJECT_TOKENS, MAX_TOKENS, MODEL, QUESTION, TOOL_RESULT, doing, kept

WS_URL = f"{ADDRESS.replace('http', 'ws', 1)}/v1/realtime?model={MODEL}"
set_tracing_disabled(True)


class Talk:
    """A session, all that it said, and a microphone that is on."""

    def __init__(self, session: RealtimeSession, mic: Microphone) -> None:
        self.session, self.mic = session, mic
        self.events: list[Any] = []

    async def read(self) -> None:
        async for event in self.session:
            self.events.append(event)

    def of(self, kind: str, since: int = 0) -> list[Any]:
        return [event for event in self.events[since:] if event.type == kind]

    def said(self, kind: str, since: int = 0) -> list[Any]:
        """Events of the model as the client read them."""
        return [event.data for event in self.of("raw_model_event", since) if event.data.type == kind]

    async def next(self, look: Callable[[], Sequence[Any]]) -> Any:
        """What is found first."""
        await until(look)
        return look()[0]

    @property
    def errors(self) -> list[str]:
        """What the client calls one, and what it cannot read."""
        return [str(each.error) for each in self.of("error")] + [str(each.exception) for each in self.said("exception")]


@asynccontextmanager
async def talk(agent: RealtimeAgent, **settings: Any) -> AsyncIterator[Talk]:
    runner = RealtimeRunner(starting_agent=agent)
    config: Any = {"url": WS_URL, "api_key": KEY, "initial_model_settings": settings}
    async with await runner.run(model_config=config) as session, microphone(session.send_audio) as mic:
        it = Talk(session, mic)
        reads = asyncio.create_task(it.read())
        try:
            yield it
        finally:
            reads.cancel()
            await asyncio.wait([reads])


def heard(it: Talk, since: int = 0) -> bytes:
    return b"".join(event.audio.data for event in it.of("audio", since))


def text(it: Talk, since: int = 0) -> str:
    return "".join(event.delta for event in it.said("transcript_delta", since))


def usage_of(event: Any) -> dict[str, int]:
    return {
        "text in": event.input_tokens_details.text_tokens,
        "sound in": event.input_tokens_details.audio_tokens,
        "text out": event.output_tokens_details.text_tokens,
    }


async def spoken(it: Talk, name: str) -> int:
    """A turn, and the answer to it. Returns where it begins in the events."""
    since = len(it.events)
    it.mic.say(name)
    await until(lambda: it.of("agent_end", since))
    return since


async def turns() -> None:
    async with talk(RealtimeAgent(name="assistant"), max_output_tokens=MAX_TOKENS) as it:
        with doing("spoken turn") as seen:
            await spoken(it, FIRST)
            first = text(it)
            seen |= {"text": first, "file": kept("spoken.pcm", heard(it)), "errors": it.errors}
        await played(heard(it))
        with doing("second turn") as seen:
            since = await spoken(it, SECOND)
            # It retrieves the answer each time that a turn was written down.
            await until(lambda: len(it.said("input_audio_transcription_completed")) == 2)
            history = it.of("history_updated")[-1].history
            users = [item for item in history if item.role == "user"]
            answers = [part.transcript for item in history if item.role == "assistant" for part in item.content]
            seen |= {"text": text(it, since), "first": usage_of(it.said("usage")[0])}
            seen |= {"second": usage_of(it.said("usage")[1]), "errors": it.errors}
            seen["kept"] = len(users) == 2 and answers == [first, text(it, since)]


async def interruption() -> None:
    async with talk(RealtimeAgent(name="assistant"), max_output_tokens=LONG_TOKENS) as it:
        with doing("interruption") as seen:
            it.mic.say(FIRST)
            answer = await it.next(lambda: it.of("audio"))
            it.mic.say(SECOND)
            interrupted = await it.next(lambda: it.of("audio_interrupted"))
            assert interrupted.item_id == answer.item_id
            await until(lambda: it.of("agent_end"))
            since = len(it.events)
            await until(lambda: it.of("agent_end", since))
            raw = [event.data for event in it.said("raw_server_event")]
            done = next(each["response"] for each in raw if each["type"] == "response.done")
            late = [each.delta for each in it.said("transcript_delta", since) if each.response_id == done["id"]]
            seen |= {"status": done["status"], "reason": done["status_details"]["reason"], "late": late}
            seen |= {"text": text(it, since), "errors": it.errors}


async def tool() -> None:
    with doing("tool") as seen:
        sessions: list[RealtimeSession] = []

        @function_tool
        async def set_lamp(color: Literal["red", "green"], on: bool) -> str:
            """Sets the lamp."""
            seen["arguments"] = {"color": color, "on": on}
            # Or it would be called by the answer to its result too.
            settings: Any = {"tools": [set_lamp], "tool_choice": "none", "max_output_tokens": MAX_TOKENS}
            await sessions[0].model.send_event(RealtimeModelSendSessionUpdate(session_settings=settings))
            return TOOL_RESULT

        agent = RealtimeAgent(name="assistant", tools=[set_lamp])
        async with talk(agent, tool_choice="required", max_output_tokens=MAX_OBJECT_TOKENS) as it:
            sessions.append(it.session)
            it.mic.say(FIRST)
            ended = await it.next(lambda: it.of("tool_end"))
            assert ended.output == TOOL_RESULT
            await until(lambda: len(it.of("agent_end")) == 2)
            seen |= {"name": ended.tool.name, "text": text(it), "errors": it.errors}


async def dropped_connection() -> None:
    with doing("dropped connection") as seen:
        agent = RealtimeAgent(name="assistant")
        before = await cancelled()
        async with talk(agent, max_output_tokens=LONG_TOKENS) as it:
            it.mic.say(FIRST)
            await until(lambda: it.said("transcript_delta"))
            it.session.model._websocket.transport.abort()
            await no_session_is_open()
        seen["cancelled"] = await cancelled() - before
        async with talk(agent, max_output_tokens=MAX_TOKENS) as it:
            await it.session.send_message(QUESTION)
            await until(lambda: it.of("agent_end"))
            seen |= {"text": text(it), "errors": it.errors}


async def main() -> None:
    await turns()
    await interruption()
    await tool()
    await dropped_connection()


asyncio.run(main())
