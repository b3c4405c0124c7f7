"""Asks a server what was not trained on, by voice, by text and with pictures, as any client of its API would."""

from __future__ import annotations

import base64
import io
import json
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any, Final

import httpx
import numpy as np

from omni_cluster.api_client import BadAnswer, Part, ServedModel, body_of, refusal
from omni_cluster.bench.http_client import AnswerParts, read_stream, read_whole
from omni_cluster.bench.record import RequestRecord, Stopwatch
from omni_cluster.openai_api.audio import S16_STEP, wav_bytes
from training import pictures
from training.speech import QUESTION_HZ, Sound, question_sound, question_voice
from training.typed import typed
from training.world import Item, Kind, Picture, Split, held_out

TRANSCRIPTIONS: Final = "/v1/audio/transcriptions"
SPOKEN_AT_ONCE: Final = 4
"""Questions that espeak-ng says at a time."""

Content = list[dict[str, Any]]


class Way(StrEnum):
    """How a question is asked. A question about a picture shows it in each way."""

    VOICE = "voice"
    TEXT = "text"
    PICTURE = "picture"


@dataclass(frozen=True, slots=True)
class Question:
    """`voice`: of the answer. `asked`: the question as it is typed. `wav`: as it is spoken, empty where it is typed."""

    item: Item
    way: Way
    voice: str
    asked: str
    wav: bytes = b""

    @property
    def content(self) -> Content:
        """Of the message."""
        shown = [] if self.item.picture is None else [picture_part(self.item.picture)]
        return [*shown, sound_part(self.wav) if self.wav else {"type": "text", "text": self.asked}]

    @property
    def seed(self) -> int:
        """Of the answer: the same each time, so that answers of two servers can be compared."""
        return zlib.crc32(self.asked.encode())


def sound_part(wav: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav).decode(), "format": "wav"}}


def picture_part(picture: Picture) -> dict[str, Any]:
    file = io.BytesIO()
    pictures.draw(picture).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def questions(way: Way, count: int, voices: Sequence[str], seed: int = 0) -> list[Question]:
    """The same for the same arguments; the voices take turns. Raises NoEspeak."""
    items = _items(way, count, seed)

    def made(number: int) -> Question:
        item, rng = items[number], Random(f"{seed} {way} {number}")
        voice = voices[number % len(voices)]
        if way is not Way.VOICE:
            return Question(item, way, voice, typed(item.question, rng))
        return Question(item, way, voice, item.question, wav_bytes(spoken(item.question, rng), QUESTION_HZ))

    with ThreadPoolExecutor(SPOKEN_AT_ONCE) as pool:
        return list(pool.map(made, range(len(items))))


def _items(way: Way, count: int, seed: int) -> list[Item]:
    if way is not Way.PICTURE:
        return held_out(count, seed)
    # Some questions about a picture come without one.
    return [item for item in held_out(2 * count, seed, Kind.PICTURE) if item.picture is not None][:count]


def spoken(question: str, rng: Random) -> Sound:
    """By a voice that is not trained on, 20 dB above its noise. Raises NoEspeak."""
    return question_sound(question, question_voice(rng, Split.HELD_OUT), rng)


@dataclass(frozen=True, slots=True)
class Answer:
    """`transcript`: what the server says that was asked, where it was asked for that."""

    question: Question
    record: RequestRecord
    sound: Sound
    transcript: str | None = None


@dataclass
class KeptParts(AnswerParts):
    """What has come of an answer, with its sound: samples of 16 bits."""

    pcm: bytearray = field(default_factory=bytearray)

    def add(self, event: Mapping[str, Any], now_s: float) -> None:
        super().add(event, now_s)
        self.pcm += Part.of(event).sound


class Asker:
    """Asks one model of a server. What goes wrong with a question is its answer's error."""

    def __init__(self, http: httpx.AsyncClient, model: ServedModel, streams: bool = True) -> None:
        """`streams`: whether an answer comes as it is made."""
        self._http = http
        self._model = model
        self._streams = streams

    async def ask(self, question: Question) -> Answer:
        """In text and sound. Making the request is the client's own time, and is not counted."""
        parts, content = KeptParts(), json.dumps(self._body(question)).encode()
        watch = Stopwatch()
        try:
            await (read_stream if self._streams else read_whole)(self._http, content, parts, watch)
        except (BadAnswer, httpx.HTTPError) as error:
            parts.error = str(error) or type(error).__name__
        record = parts.record(0, watch(), self._model.sample_rate_hz)
        return Answer(question, record, samples_of(bytes(parts.pcm)))

    def _body(self, question: Question) -> dict[str, Any]:
        usage = {"stream_options": {"include_usage": True}} if self._streams else {}
        return {
            "model": self._model.name,
            "messages": [{"role": "user", "content": question.content}],
            "modalities": ["text", "audio"],
            "audio": {"voice": question.voice, "format": "pcm16"},
            "seed": question.seed,
            "stream": self._streams,
            **usage,
        }

    async def transcribe(self, wav: bytes) -> str:
        """Raises BadAnswer, and httpx's errors."""
        form = {"model": self._model.name, "language": "en"}
        response = await self._http.post(TRANSCRIPTIONS, data=form, files={"file": ("question.wav", wav)})
        if response.status_code != httpx.codes.OK:
            raise refusal(response.status_code, response.content)
        return str(body_of(response.content)["text"])


def samples_of(pcm: bytes) -> Sound:
    """Of 16 bits."""
    return np.frombuffer(pcm, "<i2", count=len(pcm) // 2).astype(np.float32) * S16_STEP
