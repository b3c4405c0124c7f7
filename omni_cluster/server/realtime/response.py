"""One response of a session: from the conversation to its events."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from starlette.requests import HTTPConnection
from starlette.websockets import WebSocketDisconnect

from omni_cluster.engine.answer import AnswerProgress
from omni_cluster.engine.pipeline import answer_progress
from omni_cluster.openai_api.chat import ChatRequest
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.realtime.items import Conversation, Item, new_id
from omni_cluster.openai_api.realtime.session import Choice, NamedFunction, ResponseAsked, chat_tools, checked
from omni_cluster.openai_api.realtime.sound import Speaking
from omni_cluster.openai_api.tools import NamedTool, ToolChoice, tool_use_of
from omni_cluster.server.admission import AdmittedRequest
from omni_cluster.server.answers import finish_reason
from omni_cluster.server.realtime.outlet import Outlet
from omni_cluster.server.realtime.speech_time import SpeechTime
from omni_cluster.server.refusals import error_answer
from omni_cluster.server.services import Services
from omni_cluster.server.streamed import AnswerStream, open_stream
from omni_cluster.types.errors import PromptTooLong
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import AudioChunk, CallDelta, StageChunk

Status = Literal["in_progress", "completed", "cancelled", "incomplete", "failed"]
CancelReason = Literal["turn_detected", "client_cancelled"]
DROPPED_SHARE: Final = 8
"""Of the items of a prompt that is too long, an eighth is left out, the oldest, before it is tried again."""


@dataclass(frozen=True)
class Asked:
    """What a response is made of: `items` of the conversation as they were, `voice` by the model's name.

    `model`: one that is served.
    `drops_oldest`: whether a prompt that is too long may do without its oldest items.
    """

    response: ResponseAsked
    items: Sequence[Item]
    voice: str | None
    drops_oldest: bool
    model: str


class Answer:
    """The message of a response: its text, how long its sound is, and its item in the conversation."""

    def __init__(self, wants_sound: bool, index: int) -> None:
        content = "output_audio" if wants_sound else "output_text"
        self._field = "transcript" if wants_sound else "text"
        self._part: dict[str, Any] = {"type": content, self._field: ""}
        self.index = index
        self.text = ""
        self.sound_s = 0.0
        self.speech = SpeechTime()
        self.is_cut = self.is_whole = False
        wire = {
            "id": new_id("item"),
            "object": "realtime.item",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        self.item = Item(wire, {"role": "assistant", "content": []})

    @property
    def part(self) -> dict[str, Any]:
        """As the events of a content part have it."""
        return {"type": "audio" if self._field == "transcript" else "text", self._field: self.text}

    @property
    def speech_s(self) -> float:
        """How much of its sound so far is speech."""
        return self.speech.until()

    def add(self, audio: AudioChunk) -> float:
        """The next of its sound. Returns how long that is, in seconds."""
        self.speech.add(audio.samples, audio.sample_rate_hz)
        lasts_s = len(audio.samples) / audio.sample_rate_hz
        self.sound_s += lasts_s
        return lasts_s

    def end(self, status: Literal["completed", "incomplete"]) -> None:
        """From now on the conversation has the text."""
        self.is_whole = status == "completed"
        self.item.write(status=status, content=[{**self._part, self._field: self.text}])
        if not self.is_cut:
            self.keep(self.text)

    def keep(self, text: str) -> None:
        """What later responses are shown of it; nothing, where nothing was heard."""
        self.item.message["content"] = [{"type": "text", "text": text}] if text else []

    def cut(self, text: str) -> None:
        """The text of which the sound was heard is all that counts."""
        self.is_cut = True
        self.keep(text)


class Response:
    """Says what the stages make of a prompt, as events; its end is `response.done`, whatever happens."""

    def __init__(
        self,
        its: Services,
        connection: HTTPConnection,
        outlet: Outlet,
        asked: Asked,
        conversation: Conversation | None,
        says: Callable[[Answer], None],
    ) -> None:
        """`conversation`: which the answer goes into; None for one out of band. `says`: hears of a spoken answer."""
        self.id = new_id("resp")
        self.answer: Answer | None = None
        self._its, self._connection, self._outlet, self._asked = its, connection, outlet, asked
        self._conversation, self._says = conversation, says
        self._output: list[Item] = []
        self._calls: dict[int, _Call] = {}
        self._cancelled: CancelReason | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_begun = asyncio.Event()
        self._is_ending = False
        self.has_sounded = asyncio.Event()
        """Set with its first sound, or its end."""
        self._plays_until_s = 0.0
        self._progress: AnswerProgress = answer_progress(its.bound)
        self._speaking = Speaking(asked.response.audio.output.format, its.bound.sample_rate_hz)

    @property
    def has_ended(self) -> bool:
        return self._task is not None and self._task.done()

    @property
    def plays_s(self) -> float:
        """How long a client still plays its sound, which it began to play as it came."""
        return max(0.0, self._plays_until_s - time.monotonic())

    @property
    def played_s(self) -> float:
        """How much of its sound that client has played."""
        return self.answer.sound_s - self.plays_s if self.answer else 0.0

    def begin_to_play(self) -> None:
        """What was kept back of its sound reaches the client only now."""
        self._plays_until_s = time.monotonic() + (self.answer.sound_s if self.answer else 0.0)

    def start(self) -> asyncio.Task[None]:
        self._task = asyncio.ensure_future(self._unless_the_client_leaves())
        return self._task

    def stop(self, reason: CancelReason) -> None:
        """Has it say no more of its answer, and end, as soon as what runs now waits."""
        if self._task is None or self._task.done() or not self._has_begun.is_set():
            return
        if not self._is_ending and self._cancelled is None:
            self._cancelled = reason
            self._task.cancel()

    async def cancel(self, reason: CancelReason) -> None:
        """Ends it in all stages; its last events are sent when this returns."""
        await self._has_begun.wait()  # a task that is cancelled before would say nothing
        self.stop(reason)
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _unless_the_client_leaves(self) -> None:
        self._has_begun.set()
        with contextlib.suppress(WebSocketDisconnect):  # its session sees it itself, and ends
            await self._run()

    async def _run(self) -> None:
        try:
            await self._send("response.created", response=self._wire("in_progress"))
            await self._answered()
            is_whole = finish_reason(self._progress) != "length"
            details = None if is_whole else {"type": "incomplete", "reason": "max_output_tokens"}
            await self._end("completed" if is_whole else "incomplete", details)
        except asyncio.CancelledError:
            if self._cancelled is None:
                raise
            await self._end("cancelled", {"type": "cancelled", "reason": self._cancelled})
        except WebSocketDisconnect:
            raise
        except Exception as error:  # the boundary to the client: every error becomes the response's end
            body = error_answer(error, "input")[1]["error"]
            await self._end("failed", {"type": "failed", "error": {"type": body["type"], "code": body["code"]}})
            await self._outlet.error(body)

    async def _answered(self) -> None:
        async with self._its.admission.admit(self._connection) as admitted:
            if self._asked.response.wants_sound:
                admitted.allowance.check_sound()
            async with contextlib.aclosing(await self._opened(admitted)) as stream:
                async for chunk in stream:
                    admitted.meter.count_sent(await self._say(chunk))

    async def _opened(self, admitted: AdmittedRequest) -> AnswerStream[AnswerProgress]:
        """A prompt that is too long is tried with its latest items, where it may; one with media is known by its stage.

        Raises RequestError.
        """
        items = list(self._asked.items)
        while True:
            try:
                request = await self._its.reader.off_loop(functools.partial(self._request, items))
                return await open_stream(self._its.pipeline, request, admitted, self._progress)
            except PromptTooLong:
                items = self._without_oldest(items)
                if not items:
                    raise

    def _request(self, items: Sequence[Item]) -> OmniRequest:
        """Raises RequestError."""
        request_id = self._connection.scope["state"]["request_id"]
        return self._its.builder.of_chat(self._chat(items), request_id, "input")

    def _without_oldest(self, items: Sequence[Item]) -> list[Item]:
        """The latest of them; none where none may be left out."""
        oldest = [each for each in items[:-1] if each.message["role"] != "system"]
        if not (self._asked.drops_oldest and oldest):
            return []
        gone = {each.id for each in oldest[: -(-len(oldest) // DROPPED_SHARE)]}
        return [each for each in items if each.id not in gone]

    def _chat(self, items: Sequence[Item]) -> ChatRequest:
        asked, config = self._asked.response, self._its.bound.config
        instructions = [{"type": "text", "text": asked.instructions}]
        system = [{"role": "system", "content": instructions}] if asked.instructions else []
        said = [each.template_message for each in items if each.message["content"] or "tool_calls" in each.message]
        if not (system or said):
            raise BadRequest("The conversation has no items; create one first.", param="input", code="invalid_value")
        tool_use = tool_use_of(chat_tools(asked), _tool_choice(asked.tool_choice), asked.parallel_tool_calls, None)
        most = min(asked.max_tokens or config.limits.max_output_tokens, config.limits.max_output_tokens)
        return ChatRequest(
            model=self._asked.model,
            messages=(*system, *said),
            audios=tuple(audio for each in items for audio in each.audios),
            images=tuple(image for each in items for image in each.images),
            videos=(),
            tools=tool_use.tools if tool_use is not None else (),
            wants_audio=asked.wants_sound,
            voice=self._asked.voice,
            audio_format=None,
            stream=True,
            include_usage=False,
            sampling={"max_tokens": most} if asked.max_tokens else {},
            seed=None,
            tool_use=tool_use,
        )

    async def _say(self, chunk: StageChunk) -> int:
        """Returns how many bytes it took."""
        sent = 0
        if chunk.text:
            answer = await self._message()
            answer.text += chunk.text
            kind = "output_audio_transcript" if self._asked.response.wants_sound else "output_text"
            sent += await self._of_part(f"response.{kind}.delta", answer, delta=chunk.text)
        for call in chunk.calls:
            sent += await self._call(call)
        if chunk.audio is not None and (sound := self._speaking.push(chunk.audio.samples)):
            answer = await self._message()
            self._plays_until_s = max(self._plays_until_s, time.monotonic()) + answer.add(chunk.audio)
            sent += await self._sound(answer, sound)
        return sent

    async def _sound(self, answer: Answer, sound: bytes) -> int:
        self.has_sounded.set()
        return await self._of_part("response.output_audio.delta", answer, delta=base64.b64encode(sound).decode())

    async def _message(self) -> Answer:
        """The response's message, which begins with its first text or sound."""
        if self.answer is None:
            self.answer = Answer(self._asked.response.wants_sound, len(self._output))
            if self._asked.response.wants_sound:
                self._says(self.answer)
            await self._add(self.answer.item)
            await self._of_part("response.content_part.added", self.answer, part=self.answer.part)
        return self.answer

    async def _call(self, delta: CallDelta) -> int:
        if delta.index not in self._calls:
            await self._end_calls("completed")  # the one before is whole: the client may run it
            call = self._calls[delta.index] = _Call(delta, len(self._output))
            await self._add(call.item)
        call = self._calls[delta.index]
        call.item.wire["arguments"] += delta.arguments
        if not delta.arguments:
            return 0
        return await self._of_call("response.function_call_arguments.delta", call, delta=delta.arguments)

    async def _add(self, item: Item) -> None:
        self._output.append(item)
        await self._of_response("response.output_item.added", len(self._output) - 1, item=item.wire)
        if self._conversation is not None:
            previous_id = self._conversation.add(item)
            await self._outlet.send("conversation.item.added", previous_item_id=previous_id, item=item.wire)

    async def _end(self, status: Status, details: dict[str, Any] | None) -> None:
        """All that has begun ends, and then the response."""
        self._is_ending = True
        self.has_sounded.set()
        whole: Literal["completed", "incomplete"] = "completed" if status == "completed" else "incomplete"
        if self.answer is not None:
            await self._end_message(self.answer, whole)
        await self._end_calls(whole)
        await self._send("response.done", response=self._wire(status, details))

    async def _end_calls(self, status: Literal["completed", "incomplete"]) -> None:
        """Those that go on."""
        for call in self._calls.values():
            if not call.has_ended:
                call.end(status)
                arguments, name = call.item.wire["arguments"], call.item.wire["name"]
                await self._of_call("response.function_call_arguments.done", call, arguments=arguments, name=name)
                await self._end_item(call.item, call.index)

    async def _end_message(self, answer: Answer, status: Literal["completed", "incomplete"]) -> None:
        if self._asked.response.wants_sound:
            if status == "completed" and (rest := self._speaking.flush()):
                await self._sound(answer, rest)
            await self._of_part("response.output_audio.done", answer)
            await self._of_part("response.output_audio_transcript.done", answer, transcript=answer.text)
        else:
            await self._of_part("response.output_text.done", answer, text=answer.text)
        await self._of_part("response.content_part.done", answer, part=answer.part)
        answer.end(status)
        await self._end_item(answer.item, answer.index)

    async def _end_item(self, item: Item, index: int) -> None:
        await self._of_response("response.output_item.done", index, item=item.wire)
        if self._conversation is not None:
            await self._outlet.send("conversation.item.done", item=item.wire)

    async def _of_part(self, kind: str, answer: Answer, **fields: Any) -> int:
        return await self._of_response(kind, answer.index, item_id=answer.item.id, content_index=0, **fields)

    async def _of_call(self, kind: str, call: _Call, **fields: Any) -> int:
        call_id = call.item.wire["call_id"]
        return await self._of_response(kind, call.index, item_id=call.item.id, call_id=call_id, **fields)

    async def _of_response(self, kind: str, index: int, **fields: Any) -> int:
        return await self._send(kind, response_id=self.id, output_index=index, **fields)

    async def _send(self, kind: str, **fields: Any) -> int:
        return await self._outlet.send(kind, **fields)

    def _wire(self, status: Status, details: dict[str, Any] | None = None) -> dict[str, Any]:
        asked = self._asked.response
        output = {"format": asked.audio.output.format.model_dump(), "voice": self._asked.voice}
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": details,
            "output": [item.wire for item in self._output],
            "output_modalities": asked.output_modalities,
            "max_output_tokens": asked.max_output_tokens,
            "audio": {"output": output},
            "metadata": asked.metadata or None,
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        tokens = self._progress.counts
        details = {
            "text_tokens": tokens.prompt - tokens.prompt_audio,
            "audio_tokens": tokens.prompt_audio,
            "cached_tokens": tokens.cached,
        }
        made = {"text_tokens": tokens.text, "audio_tokens": tokens.codec}
        return {
            "input_tokens": tokens.prompt,
            "output_tokens": tokens.text + tokens.codec,
            "total_tokens": tokens.prompt + tokens.text + tokens.codec,
            "input_token_details": details,
            "output_token_details": made,
        }


class _Call:
    """A tool that the response calls: its item."""

    def __init__(self, first: CallDelta, index: int) -> None:
        self.index = index
        self.has_ended = False
        wire = {
            "id": new_id("item"),
            "object": "realtime.item",
            "type": "function_call",
            "status": "in_progress",
            "call_id": first.id,
            "name": first.name,
            "arguments": "",
        }
        self.item = Item(wire, {"role": "assistant", "content": []})

    def end(self, status: Literal["completed", "incomplete"]) -> None:
        self.has_ended = True
        self.item.write(status=status)
        wire = self.item.wire
        function = {"name": wire["name"], "arguments": wire["arguments"]}
        self.item.message["tool_calls"] = [{"id": wire["call_id"], "type": "function", "function": function}]


def _tool_choice(choice: Choice) -> ToolChoice:
    if isinstance(choice, NamedFunction):
        named: NamedTool = checked(NamedTool, {"type": "function", "function": {"name": choice.name}})
        return named
    return choice
