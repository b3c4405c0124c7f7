"""A client of realtime sessions with an open microphone and a loudspeaker, which people talk over."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

import numpy as np
from websockets.asyncio.client import ClientConnection

from omni_cluster.bench.errors import BenchError
from omni_cluster.openai_api.audio import pcm16
from training.asking import samples_of
from training.saying import ANSWER_HZ
from training.speech import Sound

PIECE_S: Final = 0.04
"""Of sound that goes to the server at once."""
PIECE: Final = int(PIECE_S * ANSWER_HZ)
PROBE: Final = "probe"
"""What a response out of band is known by."""

Found = TypeVar("Found")


@dataclass(slots=True)
class Played:
    """An answer as it comes and is played. `stopped_s`: what was played of it when it was talked over."""

    item_id: str = ""
    text: str = ""
    status: str | None = None
    pcm: bytearray = field(default_factory=bytearray)
    stopped_s: float | None = None
    _ends_s: float = 0.0

    @property
    def sound_s(self) -> float:
        return len(self.pcm) / 2 / ANSWER_HZ

    def add(self, pcm: bytes, now_s: float) -> None:
        self.pcm += pcm
        self._ends_s = max(self._ends_s, now_s) + len(pcm) / 2 / ANSWER_HZ

    def left_s(self, now_s: float) -> float:
        """How long what has come is still played."""
        return max(0.0, self._ends_s - now_s)

    def heard(self) -> Sound:
        """What was played of it before it was talked over."""
        sound = samples_of(bytes(self.pcm))
        return sound if self.stopped_s is None else sound[: int(self.stopped_s * ANSWER_HZ)]


class Caller:
    """One session. `send_sound` and `read` run while the other methods are called."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Condition()
        self._microphone = np.zeros(0, np.float32)
        self._starts = 0
        self._committed: list[str] = []
        self._transcripts: dict[str, str] = {}
        self._answers: dict[str, Played] = {}
        self._answer: Played | None = None
        self._probed: int | None = None

    async def read(self) -> None:
        """Until the server closes the session. Raises BenchError for an error event."""
        async for text in self._socket:
            event = json.loads(text)
            async with self._changed:
                await self._take(event)
                self._changed.notify_all()

    async def send_sound(self) -> None:
        """In real time, for as long as the session is open: what is said, else silence."""
        due_s = self._loop.time()
        while True:
            piece, self._microphone = self._microphone[:PIECE], self._microphone[PIECE:]
            pcm = pcm16(np.pad(piece, (0, PIECE - len(piece))))
            await self._send("input_audio_buffer.append", audio=base64.b64encode(pcm).decode())
            async with self._changed:
                self._changed.notify_all()
            due_s += PIECE_S
            await asyncio.sleep(due_s - self._loop.time())

    async def update(self, **session: Any) -> None:
        await self._send("session.update", session={"type": "realtime", **session})

    async def say(self, sound: Sound) -> tuple[list[str], Played]:
        """Speaks. The items that the server took the speech for, and the answer once it has begun."""
        starts, items = self._starts, len(self._committed)
        self._microphone = sound
        answer = await self._until(lambda: self._answer if self._starts > starts and not self._speaks else None)
        return self._committed[items:], answer

    @property
    def _speaks(self) -> bool:
        return len(self._microphone) > 0

    async def listen(self, answer: Played, most_s: float | None = None) -> None:
        """Until the answer was played; with `most_s`, for no longer from its first sound on."""
        await self._until(lambda: answer.status is not None or bool(answer.pcm))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._until(lambda: answer.status is not None)
                await asyncio.sleep(answer.left_s(self._loop.time()))

    async def transcripts(self, items: list[str]) -> str:
        """Of those items, once they are there."""
        await self._until(lambda: all(item in self._transcripts for item in items))
        return " ".join(self._transcripts[item] for item in items)

    async def prompt_tokens(self, *items: dict[str, Any]) -> int:
        """How many a prompt of those items has. The conversation is left as it is."""
        self._probed = None
        wanted = {"conversation": "none", "output_modalities": ["text"], "max_output_tokens": 1, "input": items}
        await self._send("response.create", response={**wanted, "metadata": {PROBE: PROBE}})
        return await self._until(lambda: self._probed)

    async def _until(self, found: Callable[[], Found | None]) -> Found:
        """What is found first that is no None, 0 or False."""
        async with self._changed:
            return cast(Found, await self._changed.wait_for(found))

    async def _take(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "error":
                raise BenchError(event["error"]["message"])
            case "input_audio_buffer.speech_started":
                self._starts += 1
                await self._stop_playing()
            case "input_audio_buffer.committed":
                self._committed.append(event["item_id"])
            case "conversation.item.input_audio_transcription.completed":
                self._transcripts[event["item_id"]] = event["transcript"]
            case "conversation.item.input_audio_transcription.failed":
                raise BenchError(event["error"]["message"])
            case "response.created" if not event["response"]["metadata"]:
                self._answer = self._answers[event["response"]["id"]] = Played()
            case "response.done":
                self._end(event["response"])
            case "response.output_audio.delta" | "response.output_audio_transcript.delta":
                self._say(event)

    async def _stop_playing(self) -> None:
        """As a client does that is talked over: the server is told what was played."""
        answer, self._answer = self._answer, None
        if answer is None or not (left_s := answer.left_s(self._loop.time())):
            return
        answer.stopped_s = answer.sound_s - left_s
        played_ms = int(1000 * answer.stopped_s)
        await self._send("conversation.item.truncate", item_id=answer.item_id, content_index=0, audio_end_ms=played_ms)

    def _say(self, event: dict[str, Any]) -> None:
        answer = self._answers.get(event["response_id"])
        if answer is None:  # out of band
            return
        answer.item_id = event["item_id"]
        if event["type"] == "response.output_audio_transcript.delta":
            answer.text += event["delta"]
        elif answer.stopped_s is None:
            answer.add(base64.b64decode(event["delta"]), self._loop.time())

    def _end(self, response: dict[str, Any]) -> None:
        if response["metadata"]:
            self._probed = response["usage"]["input_tokens"]
        else:
            self._answers[response["id"]].status = response["status"]

    async def _send(self, kind: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"type": kind, **fields}))
