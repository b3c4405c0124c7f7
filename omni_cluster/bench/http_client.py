"""Requests over the real HTTP API, as a client of it sees them."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from omni_cluster.api_client import CONNECT_TIMEOUT_S, BadAnswer, Part, ServedModel, body_of, events_of_async, refusal
from omni_cluster.bench.errors import BenchError
from omni_cluster.bench.load import Load
from omni_cluster.bench.record import RequestRecord, Said, Sound, Stopwatch, stage_seconds
from omni_cluster.bench.speech import wav

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
PCM16_BYTES = 2
FULL_SCALE = np.float32(32768)


class HttpClient:
    """Asks one server, with as many connections as there are requests."""

    def __init__(self, http: httpx.AsyncClient, model: ServedModel, load: Load) -> None:
        self._http = http
        self._model = model
        self.load = load.of(model.codes_per_s)

    @property
    def model(self) -> str:
        return self._model.name

    async def ask(self, number: int, said: Sequence[Said] = ()) -> RequestRecord:
        """See `Client.ask`; writing the body is the client's own time, and is not counted."""
        answer = AnswerParts(earlier_turns=len(said))
        body = self.body(number)
        body["messages"] = [*earlier_messages(self.load, said), *body["messages"]]
        content = json.dumps(body).encode()
        watch = Stopwatch()
        try:
            await (read_stream if self.load.stream else read_whole)(self._http, content, answer, watch)
        except (BadAnswer, httpx.HTTPError) as error:
            answer.error = str(error) or type(error).__name__
        return answer.record(number, watch(), self._model.sample_rate_hz)

    def body(self, number: int) -> dict[str, Any]:
        return chat_body(self._model, self.load, number)


def chat_body(model: ServedModel, load: Load, number: int) -> dict[str, Any]:
    """What request `number` sends: lengths by `stage_sampling_params`, raw sound, the usage that counts all tokens."""
    audio = {"format": "pcm16"} | ({"voice": load.voice} if load.voice else {})
    body: dict[str, Any] = {
        "model": model.name,
        "messages": [{"role": "user", "content": prompt(load, number)}],
        "modalities": ["text", "audio"],
        "audio": audio,
        "stage_sampling_params": load.sampling(number, model.stages),
        "stream": load.stream,
    }
    return body | ({"stream_options": {"include_usage": True}} if load.stream else {})


def earlier_messages(load: Load, said: Sequence[Said]) -> list[dict[str, Any]]:
    """Two for each turn: what was asked, and the reply."""
    messages: list[dict[str, Any]] = []
    for turn in said:
        messages.append({"role": "user", "content": prompt(load, turn.number)})
        messages.append({"role": "assistant", "content": turn.reply})
    return messages


def prompt(load: Load, number: int) -> str | list[dict[str, Any]]:
    """The content of the message: words, or one part of sound."""
    speech = load.speech(number)
    if speech is None:
        return load.message(number)
    sound = {"data": base64.b64encode(wav(speech)).decode(), "format": "wav"}
    return [{"type": "input_audio", "input_audio": sound}]


@dataclass(slots=True)
class AnswerParts:
    """What has come of one answer."""

    text_s: list[float] = field(default_factory=list)
    sound: Sound = field(default_factory=Sound)
    stages: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    usage: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    earlier_turns: int = 0
    replies: list[str] = field(default_factory=list)

    def add(self, event: Mapping[str, Any], now_s: float) -> None:
        """Takes an event of a stream, or the body of a whole answer."""
        part = Part.of(event)
        if part.text:
            self.text_s.append(now_s)
            self.replies.append(part.text)
        if part.sound:
            samples = np.frombuffer(part.sound, "<i2", count=len(part.sound) // PCM16_BYTES)
            self.sound.add(samples.astype(np.float32) / FULL_SCALE, now_s)
        self.stages = part.stages or self.stages
        self.usage = part.usage or self.usage

    def record(self, number: int, total_s: float, sample_rate_hz: int) -> RequestRecord:
        codec_tokens = (self.usage.get("completion_tokens_details") or {}).get("audio_tokens", 0)
        return RequestRecord(
            number=number,
            total_s=total_s,
            text_s=tuple(self.text_s),
            audio=tuple(self.sound.arrivals),
            audible_at=self.sound.audible_at,
            stages=stage_seconds(self.stages),
            prompt_tokens=self.usage.get("prompt_tokens", 0),
            text_tokens=self.usage.get("completion_tokens", 0) - codec_tokens,
            codec_tokens=codec_tokens,
            error=self.error,
            earlier_turns=self.earlier_turns,
            reply="".join(self.replies),
            sample_rate_hz=sample_rate_hz,
        )


async def read_stream(http: httpx.AsyncClient, content: bytes, answer: AnswerParts, watch: Stopwatch) -> None:
    """What a chat of that body is answered. Raises BadAnswer, and httpx's errors."""
    async with http.stream("POST", CHAT, content=content, headers=JSON) as response:
        if response.status_code != httpx.codes.OK:
            raise refusal(response.status_code, await response.aread())
        async for event in events_of_async(response.aiter_lines()):
            answer.add(event, watch())


async def read_whole(http: httpx.AsyncClient, content: bytes, answer: AnswerParts, watch: Stopwatch) -> None:
    """As `read_stream`, of an answer that is not streamed."""
    response = await http.post(CHAT, content=content, headers=JSON)
    if response.status_code != httpx.codes.OK:
        raise refusal(response.status_code, response.content)
    answer.add(body_of(response.text), watch())


@asynccontextmanager
async def http_client(url: str, load: Load, timeout_s: float) -> AsyncIterator[HttpClient]:
    """A client of the server at `url`, whose first model it asks. Raises BenchError when there is none to ask."""
    timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    try:
        # A proxy that the environment names would be measured with the server.
        http = httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, trust_env=False)
    except httpx.InvalidURL as error:
        raise BenchError(f"--url is {url!r} ({error}); use one such as http://127.0.0.1:8000.") from None
    async with http:
        yield HttpClient(http, await first_model(http, url), load)


async def first_model(http: httpx.AsyncClient, url: str) -> ServedModel:
    """The model that is served. Raises BenchError."""
    try:
        response = await http.get("/v1/models")
        return ServedModel.of(response.raise_for_status().json())
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise BenchError(f"{url} answered {status} to GET /v1/models; name an API server by --url.") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
        raise BenchError(f"no server answers at {url} ({why}); start one, or name its address by --url.") from None
    except (ValueError, LookupError, TypeError):
        raise BenchError(f"{url} lists no model at /v1/models; name an API server by --url.") from None
