"""What a session of speech sends, part by part: sentences, and the ends of texts."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, Final

from starlette.websockets import WebSocket, WebSocketDisconnect

from omni_cluster.engine.pipeline import answer_progress
from omni_cluster.openai_api.speech import SpeechRequest
from omni_cluster.openai_api.speech_stream import SessionConfig
from omni_cluster.server.admission import AdmittedRequest
from omni_cluster.server.answers import finish_reason, whole_sound
from omni_cluster.server.refusals import error_answer
from omni_cluster.server.services import Services
from omni_cluster.server.sessions import NORMAL_CLOSURE, check_open
from omni_cluster.server.sound_file import coded
from omni_cluster.server.streamed import open_stream, whole_output
from omni_cluster.types.inputs import OmniRequest

MOST_PIECES: Final = 64
"""Of a sentence's sound that wait to be sent, before the stages wait too."""


class SpeechOutlet:
    """What a session sends: events, and sound as binary frames."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket

    async def say(self, kind: str, **fields: Any) -> None:
        """Raises WebSocketDisconnect once the client has left."""
        check_open(self._socket)
        await self._socket.send_text(json.dumps({"type": kind, **fields}))

    async def sound(self, piece: bytes) -> None:
        """The same."""
        check_open(self._socket)
        await self._socket.send_bytes(piece)

    async def error(self, error: dict[str, Any], **fields: Any) -> None:
        """`error`: as the API's other answers have it."""
        await self.say("error", **{name: error[name] for name in ("message", "param", "code")}, **fields)


class Part:
    """What is sent in its turn. `chars`: by which those that wait are bounded."""

    chars = 1

    def begin(self) -> None:
        """It is sent now or next. May be called again."""

    async def send(self, outlet: SpeechOutlet) -> None:
        """Raises WebSocketDisconnect."""

    async def end(self) -> None:
        """It is not wanted any more."""


class TextDone(Part):
    """The end of a text, and how many sentences it had."""

    def __init__(self, utterance: int, sentences: int) -> None:
        self._utterance, self._sentences = utterance, sentences

    async def send(self, outlet: SpeechOutlet) -> None:
        await outlet.say("session.done", utterance_index=self._utterance, total_sentences=self._sentences)


class SessionClose(Part):
    """The end of the session."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket

    async def send(self, outlet: SpeechOutlet) -> None:
        await self._socket.close(NORMAL_CLOSURE)
        raise WebSocketDisconnect(NORMAL_CLOSURE)


class SpokenSentence(Part):
    """A request of its own, as `/v1/audio/speech` has it; what breaks it is said in its place."""

    def __init__(
        self, its: Services, socket: WebSocket, config: SessionConfig, text: str, utterance: int, index: int
    ) -> None:
        self.chars = len(text)
        self._its, self._socket, self._config, self._text = its, socket, config, text
        self._place = {"utterance_index": utterance, "sentence_index": index}
        self._made: asyncio.Task[str] | None = None
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(MOST_PIECES)

    def begin(self) -> None:
        self._making()

    def _making(self) -> asyncio.Task[str]:
        if self._made is None:
            self._made = asyncio.ensure_future(self._make())
            self._made.add_done_callback(lambda _: self._pieces.put_nowait(None))
        return self._made

    async def end(self) -> None:
        if self._made is not None:
            self._made.cancel()
            await asyncio.gather(self._made, return_exceptions=True)  # what broke it is of no use any more

    async def send(self, outlet: SpeechOutlet) -> None:
        sound = {"format": self._config.format, "sample_rate": self._its.bound.sample_rate_hz, "channels": 1}
        await outlet.say("audio.start", **self._place, sentence_text=self._text, **sound)
        made, sent, finished = self._making(), 0, None
        try:
            while (piece := await self._pieces.get()) is not None:
                self._room.release()
                sent += len(piece)
                await outlet.sound(piece)
            finished = made.result()
        except WebSocketDisconnect:
            raise
        except Exception as error:  # the boundary to the client: what breaks is the end of this sentence alone
            half = {"partial_audio": True, "action": "discard"} if sent else {}
            await outlet.error(error_answer(error, "input")[1]["error"], **self._place, **half)
        ended = {"total_bytes": sent, "error": finished is None, "finish_reason": finished}
        await outlet.say("audio.done", **self._place, **ended)

    async def _make(self) -> str:
        """Why the sound ends."""
        async with self._its.admission.admit(self._socket) as admitted:
            admitted.allowance.check_sound()
            spoken, request = await self._its.reader.spoken(self._config.body(self._text), self._built)
            make = self._whole if spoken.stream_format is None else self._streamed
            return await make(spoken, request, admitted)

    def _built(self, spoken: SpeechRequest) -> tuple[SpeechRequest, OmniRequest]:
        return spoken, self._its.builder.of_speech(spoken, self._socket.scope["state"]["request_id"])

    async def _whole(self, spoken: SpeechRequest, request: OmniRequest, admitted: AdmittedRequest) -> str:
        output = await whole_output(self._its.pipeline, request, admitted)
        sound = await asyncio.to_thread(whole_sound, output.audio, spoken.format, spoken.sample_rate_hz)
        await self._put(sound, admitted)
        return finish_reason(output)

    async def _streamed(self, spoken: SpeechRequest, request: OmniRequest, admitted: AdmittedRequest) -> str:
        answer = await open_stream(self._its.pipeline, request, admitted, answer_progress(self._its.bound))
        async with contextlib.aclosing(coded(spoken, answer, self._its.coding)) as pieces:
            async for piece in pieces:
                await self._put(piece, admitted)
        return finish_reason(answer.progress)

    async def _put(self, piece: bytes, admitted: AdmittedRequest) -> None:
        await self._room.acquire()
        admitted.meter.count_sent(len(piece))
        self._pieces.put_nowait(piece)
