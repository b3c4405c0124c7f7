"""A session that speaks a text while it comes: sentence by sentence, each of them a request of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from typing import Final, NoReturn

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from omni_cluster.engine.deadline import Deadline
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.sentences import SentenceSplitter
from omni_cluster.openai_api.speech import MAX_INPUT_CHARS
from omni_cluster.openai_api.speech_stream import InputDone, InputText, SessionConfig, speech_event
from omni_cluster.server.refusals import error_answer
from omni_cluster.server.services import Services
from omni_cluster.server.sessions import NORMAL_CLOSURE
from omni_cluster.server.speech_parts import Part, SessionClose, SpeechOutlet, SpokenSentence, TextDone
from omni_cluster.server.streamed import gathered
from omni_cluster.types.errors import OmniError, ServerClosing

CONFIG_S: Final = 10.0
"""Until the first event."""
IDLE_S: Final = 30.0
"""Between events, while nothing is spoken. Both are vLLM-Omni's."""
MOST_WAITING_CHARS: Final = 65_536
"""Of sentences that are not spoken yet: an hour of speech."""
AT_ONCE: Final = 2
"""Sentences that are made: the one that is sent, and the next."""


class TooMuchText(BadRequest):
    """What ends a session: text that is not kept would be missing in the speech."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="text_too_long")


class SpeechSession:
    """One client's texts. What is sent is in the order of the text; while a sentence is sent, the next one is made."""

    def __init__(self, its: Services, socket: WebSocket, until: Deadline) -> None:
        """`until`: the end of the session's time; it comes sooner when the server closes."""
        self._its, self._socket, self._until = its, socket, until
        self._outlet = SpeechOutlet(socket)
        self._config: SessionConfig | None = None
        self._splitter = SentenceSplitter("none")
        self._is_within = False
        self._utterance = self._sentences = 0
        self._unsent: deque[Part] = deque()
        self._waiting_chars = 0
        self._news, self._all_sent = asyncio.Event(), asyncio.Event()
        self._all_sent.set()
        self._moved_s = self._now_s

    @property
    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Until all that came before `session.close` is spoken. Raises WebSocketDisconnect, or BadRequest."""
        try:
            await gathered((self._read(), self._send_all(), self._end_when_the_server_closes()))
        finally:
            await asyncio.gather(*(part.end() for part in self._unsent))

    # ------------------------------------------------------------ what comes

    async def _read(self) -> NoReturn:
        while True:
            receiving = asyncio.ensure_future(self._socket.receive())
            try:
                message = await self._in_time(receiving)
            finally:
                receiving.cancel()
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message.get("code", NORMAL_CLOSURE))
            self._moved_s = self._now_s
            await self._take(message.get("text") or (message.get("bytes") or b"").decode("utf-8", "replace"))

    async def _in_time(self, receiving: asyncio.Future[Message]) -> Message:
        """Raises BadRequest for a client that says nothing for too long; one whose text is spoken may."""
        most_s = CONFIG_S if self._config is None else IDLE_S
        while not receiving.done():
            left_s = self._moved_s + most_s - self._now_s if self._all_sent.is_set() else most_s
            if left_s <= 0:
                wanted = "session.config should come" if self._config is None else "text should come, or session.close"
                raise BadRequest(f"Nothing came for {most_s:g} s; {wanted} within that.", code="session_idle")
            await asyncio.wait((receiving,), timeout=left_s)
        return receiving.result()

    async def _take(self, text: str) -> None:
        """What is wrong with an event is said, and the session goes on; not if it is the first event."""
        try:
            event = speech_event(text, self._its.bound.config.model)
            if isinstance(event, SessionConfig):
                await self._configure(event)
            elif self._config is None:
                raise BadRequest("The first event is none of session.config; send that first.", code="invalid_value")
            elif isinstance(event, InputText):
                self._hear(event.text, self._config)
            elif isinstance(event, InputDone):
                self._end_text(self._config)
            else:
                self._close(self._config)
        except OmniError as error:
            if self._config is None or isinstance(error, TooMuchText):
                raise
            await self._outlet.error(error_answer(error)[1]["error"])

    async def _configure(self, config: SessionConfig) -> None:
        """Raises BadRequest for what no sentence could be spoken with."""
        if self._is_within:
            raise BadRequest("session.config came within a text; send input.done before it.", code="invalid_value")
        await self._its.reader.spoken(config.body("a"), lambda spoken: spoken)
        self._config, self._splitter = config, SentenceSplitter(config.granularity)

    def _hear(self, text: str, config: SessionConfig) -> None:
        self._is_within = self._is_within or bool(text)
        for sentence in self._splitter.push(text):
            self._speak(sentence, config)
        if (chars := len(self._splitter.rest)) > MAX_INPUT_CHARS:
            raise TooMuchText(
                f"{chars} characters came without an end of a sentence, but at most {MAX_INPUT_CHARS} may; send "
                "input.done before that, or text with sentences and a split_granularity that is not none."
            )

    def _end_text(self, config: SessionConfig) -> None:
        for sentence in self._splitter.flush():
            self._speak(sentence, config)
        self._add(TextDone(self._utterance, self._sentences))
        self._is_within, self._sentences = False, 0
        self._utterance += 1

    def _close(self, config: SessionConfig) -> None:
        if self._is_within:
            self._end_text(config)
        self._add(SessionClose(self._socket))

    def _speak(self, text: str, config: SessionConfig) -> None:
        self._add(SpokenSentence(self._its, self._socket, config, text, self._utterance, self._sentences))
        self._sentences += 1

    def _add(self, part: Part) -> None:
        self._waiting_chars += part.chars
        if self._waiting_chars > MOST_WAITING_CHARS:
            raise TooMuchText(
                f"{self._waiting_chars} characters wait to be spoken, but at most {MOST_WAITING_CHARS} may; send text "
                "as it is spoken."
            )
        self._unsent.append(part)
        self._begin()
        self._all_sent.clear()
        self._news.set()

    # ---------------------------------------------------------- what is sent

    def _begin(self) -> None:
        for part in itertools.islice(self._unsent, AT_ONCE):
            part.begin()

    async def _send_all(self) -> NoReturn:
        while True:
            while not self._unsent:
                self._all_sent.set()
                self._news.clear()
                await self._news.wait()
            await self._unsent[0].send(self._outlet)
            self._waiting_chars -= self._unsent.popleft().chars
            self._moved_s = self._now_s
            self._begin()

    async def _end_when_the_server_closes(self) -> None:
        """What was begun may be spoken."""
        await self._its.admission.closing.begun.wait()
        await self._all_sent.wait()
        self._until.come_now(ServerClosing("the server is closing; connect again."))
