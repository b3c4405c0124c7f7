"""A session: what a client asks of it, event by event."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from starlette.websockets import WebSocket, WebSocketDisconnect

from omni_cluster.engine.deadline import Deadline
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.realtime import client_events as asked
from omni_cluster.openai_api.realtime.client_events import ClientEvent, EventRefused, client_event
from omni_cluster.openai_api.realtime.items import PART_BYTES, Conversation, Item, new_id, sent_item, spoken_item
from omni_cluster.openai_api.realtime.session import ResponseAsked, ServerVad, Session, chat_tools
from omni_cluster.openai_api.realtime.sound import HEARD_HZ, decoded
from omni_cluster.openai_api.voices import chosen_voice
from omni_cluster.server.limits import api_defaults
from omni_cluster.server.realtime.inbox import Inbox
from omni_cluster.server.realtime.input_buffer import (
    InputBuffer,
    Silence,
    SpeechPaused,
    SpeechResumed,
    SpeechStarted,
    SpeechStopped,
    Turn,
)
from omni_cluster.server.realtime.outlet import HeldOutlet, Outlet
from omni_cluster.server.realtime.response import Answer, Asked, Response
from omni_cluster.server.realtime.spoken_text import heard_text, letters_per_s
from omni_cluster.server.realtime.transcriber import ITEM_IS_GONE, TURNED_OFF, give_up, write_down
from omni_cluster.server.refusals import error_answer
from omni_cluster.server.services import Services
from omni_cluster.types.errors import OmniError, ServerClosing

MOST_ITEMS: Final = 1024
BYTES_A_SAMPLE: Final = 4
MOST_OUT_OF_BAND: Final = 4
ANSWER_BEGINS_S: Final = 0.2
"""In which a client that commits its sound asks for the answer."""


KEEP_EARLY: Final = (asked.AppendSound, asked.RetrieveItem)
"""Events that change nothing of what an answer is made of."""


@dataclass(frozen=True)
class _Early:
    """An answer that was begun in a pause, and the conversation as it is if the pause was the end of the turn."""

    response: Response
    outlet: HeldOutlet
    conversation: Conversation
    item: Item
    previous_id: str | None


class RealtimeSession:
    """One client's, for as long as its socket is open; its conversation ends with it."""

    def __init__(self, its: Services, socket: WebSocket, until: Deadline) -> None:
        """`until`: the end of the session's time; it comes sooner when the server closes."""
        limits = its.bound.config.limits
        self._its, self._socket, self._until = its, socket, until
        self._outlet = Outlet(socket)
        self._id = new_id("sess")
        self._ends_at_s = int(time.time() + limits.max_session_s)
        self._conversation = Conversation(MOST_ITEMS, limits.max_session_bytes)
        self._session = Session()
        self._model = self._known_model(socket.query_params.get("model"))
        self._voice = self._known_voice(None)
        sound = self._session.audio.input
        has_room_for = (limits.max_session_bytes - PART_BYTES) // BYTES_A_SAMPLE
        most = min(int(limits.max_audio_input_s * HEARD_HZ), max(0, has_room_for))
        self._input = InputBuffer(sound.format, sound.turn_detection, most)
        self._running: Response | None = None
        self._beside: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._unwritten: deque[str] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._silence: asyncio.Task[None] | None = None
        self._early: _Early | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers: dict[str, Answer] = {}
        self._handlers: Mapping[type[ClientEvent], Callable[[Any], Awaitable[None]]] = {
            asked.SessionUpdate: self._update,
            asked.AppendSound: self._append,
            asked.CommitSound: self._commit,
            asked.ClearSound: self._clear,
            asked.CreateItem: self._create_item,
            asked.RetrieveItem: self._retrieve_item,
            asked.DeleteItem: self._delete_item,
            asked.TruncateItem: self._truncate_item,
            asked.CreateResponse: self._create_response,
            asked.CancelResponse: self._cancel_response,
        }

    async def run(self) -> None:
        """Until the client leaves. Raises WebSocketDisconnect, and BadRequest for a client that sends too fast."""
        inbox = Inbox(self._socket, self._its.bound.config.limits.max_session_bytes)
        self._run_beside(self._end_when_the_server_closes())
        try:
            await self._outlet.send("session.created", session=self._wire())
            filling = self._run_beside(inbox.fill())
            async for text in inbox.texts():
                async with self._turn:
                    await self._take(text)
            await filling  # raises what broke the connection
        finally:
            while tasks := {*self._tasks, *self._beside}:  # the end of one may begin another
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _run_beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Until it ends, or the session does."""
        task = asyncio.ensure_future(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task

    async def _end_when_the_server_closes(self) -> None:
        """Responses that run may finish."""
        await self._its.admission.closing.begun.wait()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._until.come_now(ServerClosing("the server is closing; connect again."))

    async def _take(self, text: str) -> None:
        """What is wrong with an event is said, and the session goes on."""
        event_id = None
        try:
            event = client_event(text)
            event_id = event.event_id
            if not isinstance(event, KEEP_EARLY):
                await self._drop_early()
            await self._handlers[type(event)](event)
        except EventRefused as error:
            await self._outlet.error(error.body()["error"], error.event_id)
        except OmniError as error:
            await self._outlet.error(error_answer(error, "item")[1]["error"], event_id)

    async def _update(self, event: asked.SessionUpdate) -> None:
        updated = self._session.updated(event.session)
        chat_tools(updated)  # what no response could use is refused now
        voice = self._known_voice(updated.audio.output.voice)
        if voice != self._voice and self._answers:
            raise BadRequest(
                "Cannot update a conversation's voice if assistant audio is present.",
                param="session.audio.output.voice",
                code="cannot_update_voice",
            )
        before, sound = self._session.audio.input, updated.audio.input
        self._session, self._voice = updated, voice
        if (sound.format, sound.turn_detection) != (before.format, before.turn_detection):
            self._input.configure(sound.format, sound.turn_detection)
            self._end_silence()
        await self._outlet.send("session.updated", session=self._wire())

    async def _append(self, event: asked.AppendSound) -> None:
        """What was found in the sound is said once all of it was heard."""
        for turn in await self._its.reader.off_loop(lambda: self._hear(event.audio), len(event.audio)):
            match turn:
                case SpeechStarted():
                    await self._start_turn(turn)
                case SpeechPaused():
                    self._begin_early(turn)
                case SpeechResumed():
                    await self._drop_early()
                case SpeechStopped():
                    await self._end_turn(turn)

    def _hear(self, audio: str) -> list[Turn]:
        return self._input.push(decoded(audio, "audio"))

    async def _start_turn(self, turn: SpeechStarted) -> None:
        """Speech ends the response that runs: the client hears of the speech first, and stops to play.

        Nothing of the answer comes behind that, also to a client that takes what is sent to it slowly.
        """
        detection = self._session.audio.input.turn_detection
        interrupted = self._running if detection is not None and detection.interrupt_response else None
        if interrupted is not None:
            interrupted.stop("turn_detected")
        await self._outlet.send("input_audio_buffer.speech_started", audio_start_ms=turn.start_ms, item_id=turn.item_id)
        if interrupted is not None:
            await self._interrupt(interrupted)
        self._end_silence()  # also the one that began with the end of that response

    async def _interrupt(self, response: Response) -> None:
        """What was played by now is taken for what was heard, unless the client truncates the answer itself."""
        played_s = response.played_s
        await response.cancel("turn_detected")
        answer = response.answer
        if answer is not None and answer.item.id in self._answers and not answer.is_cut:
            self._cut(answer, played_s)

    async def _end_turn(self, turn: SpeechStopped) -> None:
        await self._outlet.send("input_audio_buffer.speech_stopped", audio_end_ms=turn.end_ms, item_id=turn.item_id)
        if self._early is not None:
            await self._confirm_early(self._early)
            return
        await self._keep_spoken(turn.item_id, turn.samples)
        if self._answers_turns:
            await self._create_response(asked.CreateResponse())

    @property
    def _answers_turns(self) -> bool:
        detection = self._session.audio.input.turn_detection
        return self._running is None and detection is not None and detection.create_response

    def _begin_early(self, turn: SpeechPaused) -> None:
        """Begins the answer to what may be the whole turn. Nothing of it is said before the turn is over."""
        if not self._answers_turns:
            return
        conversation, item = self._conversation.fork(), spoken_item(turn.item_id, turn.samples)
        previous_id = conversation.add(item, drops_oldest=self._drops_oldest)
        response = ResponseAsked.of(self._session, None)
        wanted = Asked(response, list(conversation), self._voice, self._drops_oldest, self._model)
        outlet = HeldOutlet(self._socket)
        begun = Response(self._its, self._socket, outlet, wanted, conversation, self._remember(conversation))
        self._early = _Early(begun, outlet, conversation, item, previous_id)
        self._started(begun)

    async def _confirm_early(self, early: _Early) -> None:
        self._early, self._conversation = None, early.conversation
        early.response.begin_to_play()
        if early.response.has_ended:
            self._begin_silence(early.response)
        else:
            self._running = early.response
            self._end_silence()
        await self._say_spoken(early.item, early.previous_id)
        await early.outlet.release()

    async def _drop_early(self) -> None:
        """The turn goes on, or something else changed what the answer was begun with: it leaves no trace."""
        early, self._early = self._early, None
        if early is not None:
            await early.response.cancel("turn_detected")
            if early.response.answer is not None:
                self._answers.pop(early.response.answer.item.id, None)

    async def _commit(self, event: asked.CommitSound) -> None:
        await self._keep_spoken(*self._input.commit())

    async def _keep_spoken(self, item_id: str, samples: npt.NDArray[np.float32]) -> None:
        item = spoken_item(item_id, samples)
        await self._say_spoken(item, self._conversation.add(item, drops_oldest=self._drops_oldest))

    async def _say_spoken(self, item: Item, previous_id: str | None) -> None:
        await self._outlet.send("input_audio_buffer.committed", previous_item_id=previous_id, item_id=item.id)
        await self._say_item(item, previous_id)
        if self._session.audio.input.transcription is not None:
            await self._ask_for_words(item.id)

    async def _ask_for_words(self, item_id: str) -> None:
        """Ids wait, and only those of the conversation: so what waits is bounded as the conversation is."""
        there = {item.id for item in self._conversation}
        gone = [each for each in self._unwritten if each not in there]
        self._unwritten = deque(each for each in self._unwritten if each in there)
        self._unwritten.append(item_id)
        if self._writer is None or self._writer.done():
            self._writer = self._run_beside(self._write_down())
        for each in gone:
            await give_up(self._outlet, each, ITEM_IS_GONE)

    async def _write_down(self) -> None:
        """One item after the other, each behind the first sound of the answer to it, which is waited for a little."""
        with contextlib.suppress(WebSocketDisconnect):  # the session sees it itself
            while self._unwritten:
                item_id = self._unwritten.popleft()
                if self._running is None:
                    await asyncio.sleep(ANSWER_BEGINS_S)
                if self._running is not None:
                    await self._running.has_sounded.wait()
                await self._write_down_one(item_id)

    async def _write_down_one(self, item_id: str) -> None:
        """By the settings of now: each that waits would hold a prompt of its own."""
        settings = self._session.audio.input.transcription
        item = next((each for each in self._conversation if each.id == item_id), None)
        if settings is None or item is None:
            await give_up(self._outlet, item_id, ITEM_IS_GONE if item is None else TURNED_OFF)
        else:
            await write_down(self._its, self._socket, self._outlet, item, settings, self._model)

    async def _clear(self, event: asked.ClearSound) -> None:
        self._input.clear()
        await self._outlet.send("input_audio_buffer.cleared")

    async def _create_item(self, event: asked.CreateItem) -> None:
        item = await self._read(event.item)
        previous_id = self._conversation.add(item, event.previous_item_id, drops_oldest=self._drops_oldest)
        await self._say_item(item, previous_id)

    async def _read(self, sent: Mapping[str, Any]) -> Item:
        """Raises BadRequest."""
        sound, max_s = self._session.audio.input.format, self._its.bound.config.limits.max_audio_input_s
        item, urls = await self._its.reader.off_loop(lambda: sent_item(sent, sound, max_s))
        if urls:
            item.images.extend(await self._pictures(urls))
        return item

    async def _pictures(self, urls: Mapping[str, str]) -> list[npt.NDArray[np.uint8]]:
        """Copies: a decoder's own count in `decoders.max_held_bytes` of all requests for as long as one is kept."""
        pictures = await self._its.reader.pictures(urls)
        num_bytes = sum(each.nbytes for each in pictures)
        return await self._its.reader.off_loop(lambda: [np.array(each) for each in pictures], num_bytes)

    async def _say_item(self, item: Item, previous_id: str | None) -> None:
        for kind in ("conversation.item.added", "conversation.item.done"):
            await self._outlet.send(kind, previous_item_id=previous_id, item=item.wire)

    async def _retrieve_item(self, event: asked.RetrieveItem) -> None:
        item = self._conversation.get(event.item_id, "item_retrieve_invalid_item_id")
        await self._outlet.send("conversation.item.retrieved", item=item.wire)

    async def _delete_item(self, event: asked.DeleteItem) -> None:
        self._conversation.delete(event.item_id)
        self._answers.pop(event.item_id, None)
        await self._outlet.send("conversation.item.deleted", item_id=event.item_id)

    async def _truncate_item(self, event: asked.TruncateItem) -> None:
        """Later responses are shown what was heard. A time beyond the sound is its end, as clients round it up."""
        self._conversation.get(event.item_id, "item_truncate_invalid_item_id")
        answer = self._answers.get(event.item_id)
        if answer is None:
            raise BadRequest(
                f"The item {event.item_id!r} is no spoken answer; only these are truncated.",
                param="item_id",
                code="item_truncate_invalid_item_id",
            )
        self._cut(answer, event.audio_end_ms / 1000)
        fields = {"item_id": event.item_id, "content_index": event.content_index, "audio_end_ms": event.audio_end_ms}
        await self._outlet.send("conversation.item.truncated", **fields)

    def _cut(self, answer: Answer, heard_s: float) -> None:
        pace = letters_per_s(answer, reversed(self._answers.values()))
        answer.cut(heard_text(answer.text, answer.speech.until(heard_s) * pace))

    async def _create_response(self, event: asked.CreateResponse) -> None:
        response = ResponseAsked.of(self._session, event.response)
        voice = self._known_voice(response.audio.output.voice)
        items = list(self._conversation)
        if response.input is not None:
            items = [await self._input_item(each) for each in response.input]
        self._begin(Asked(response, items, voice, self._drops_oldest, self._model))

    @property
    def _drops_oldest(self) -> bool:
        return self._session.truncation != "disabled"

    async def _input_item(self, sent: Mapping[str, Any]) -> Item:
        """An item of a response's own input, or the conversation's that it names."""
        if sent.get("type") == "item_reference":
            return self._conversation.get(str(sent.get("id")), "item_retrieve_invalid_item_id")
        return await self._read(sent)

    def _begin(self, wanted: Asked) -> None:
        """Raises BadRequest while another one runs."""
        is_out_of_band = wanted.response.conversation == "none"
        if not is_out_of_band and self._running is not None:
            raise BadRequest(
                f"Conversation already has an active response in progress: {self._running.id}. Wait until the response "
                "is finished before creating a new one.",
                code="conversation_already_has_active_response",
            )
        if is_out_of_band and len(self._tasks) - (self._running is not None) >= MOST_OUT_OF_BAND:
            raise BadRequest(
                f"{MOST_OUT_OF_BAND} responses out of band run, which is as many as may; wait until one has ended.",
                code="too_many_requests",
            )
        conversation = None if is_out_of_band else self._conversation
        response = Response(self._its, self._socket, self._outlet, wanted, conversation, self._remember(conversation))
        self._started(response)
        if not is_out_of_band:
            self._running = response
            self._end_silence()

    def _started(self, response: Response) -> None:
        task = response.start()
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._ended(response, task))

    def _remember(self, conversation: Conversation | None) -> Callable[[Answer], None]:
        """Answers of the conversation may be truncated later; those that have left it are forgotten."""

        def remembered(answer: Answer) -> None:
            if conversation is not None:
                there = {item.id for item in (*self._conversation, *conversation)}
                self._answers = {name: each for name, each in self._answers.items() if name in there}
                self._answers[answer.item.id] = answer

        return remembered

    def _ended(self, response: Response, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._running is response:
            self._running = None
            self._begin_silence(response)

    def _begin_silence(self, after: Response) -> None:
        """Once the answer was played, the client's silence is answered too, where the session asks for that."""
        self._end_silence()
        detection = self._session.audio.input.turn_detection
        if self._input.is_speaking:  # the end of that speech is answered
            return
        if isinstance(detection, ServerVad) and detection.idle_timeout_ms is not None:
            wait_s = after.plays_s + detection.idle_timeout_ms / 1000
            self._silence = self._run_beside(self._answer_silence(wait_s))

    def _end_silence(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    async def _answer_silence(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        async with self._turn:
            self._silence = None  # the response that it begins does not end it
            if self._running is not None or self._early is not None or self._input.is_speaking:
                return
            with contextlib.suppress(WebSocketDisconnect):  # the session sees it itself
                await self._keep_silence(self._input.silence())

    async def _keep_silence(self, silence: Silence) -> None:
        fields = {"audio_start_ms": silence.start_ms, "audio_end_ms": silence.end_ms, "item_id": silence.item_id}
        await self._outlet.send("input_audio_buffer.timeout_triggered", **fields)
        try:
            await self._keep_spoken(silence.item_id, silence.samples)
            await self._create_response(asked.CreateResponse())
        except OmniError as error:
            await self._outlet.error(error_answer(error, "item")[1]["error"])

    async def _cancel_response(self, event: asked.CancelResponse) -> None:
        running = self._running
        if running is None or event.response_id not in (None, running.id):
            raise BadRequest("Cancellation failed: no active response found", code="response_cancel_not_active")
        await running.cancel("client_cancelled")

    def _known_model(self, name: str | None) -> str:
        """The checkpoint where none is served by that name, as the clients of others send theirs."""
        models = self._its.bound.config.models
        return name if name in models else models[0]

    def _known_voice(self, name: str | None) -> str:
        """Of the model: the default where it has none of that name, as the clients of others send theirs."""
        family = self._its.bound.family
        aliases = api_defaults(self._its.bound).voice_aliases
        try:
            named = chosen_voice({"voice": name}, family.voices, aliases)
        except BadRequest:
            named = None
        return str(family.check_voice(named))

    def _wire(self) -> dict[str, Any]:
        wire = self._session.model_dump()
        wire["audio"]["output"]["voice"] = self._voice
        return {
            **wire,
            "object": "realtime.session",
            "id": self._id,
            "model": self._model,
            "expires_at": self._ends_at_s,
        }
