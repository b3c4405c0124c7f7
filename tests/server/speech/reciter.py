"""A pipeline whose sound says which text it speaks, a server of it, and a client of texts that come in pieces."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from websockets.asyncio.client import ClientConnection, connect

from omni_cluster.config.limits import Limits
from omni_cluster.config.schema import PipelineConfig
from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.fan_in import StageEvent
from omni_cluster.serve_local import listening
from omni_cluster.server.app import HttpServer
from omni_cluster.types.errors import StageDied
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import AudioChunk, StageChunk
from tests.server.keyed import config_of
from tests.server.speaker import RATE_HZ, Speaker

PATH = "/v1/audio/speech/stream"
PATIENCE_S = 60
BROKEN = "broken"
"""A word at which the stages break."""


class Reciter(Speaker):
    """Says a piece of sound a word, in its voice; the same for the same text."""

    def __init__(self, config: PipelineConfig) -> None:
        super().__init__(config)
        self.texts: list[str] = []
        self.made: Counter[str] = Counter()
        """Words that were said, by text."""
        self.held: dict[str, asyncio.Event] = {}

    def hold(self, text: str) -> asyncio.Event:
        """The text is spoken once the event is set."""
        return self.held.setdefault(text, asyncio.Event())

    async def stream(self, request: OmniRequest, deadline: Deadline) -> AsyncGenerator[StageEvent, None]:
        text = str(request.reply)
        self.texts.append(text)
        self.running += 1
        loud = 0.5 if request.voice == "Ethan" else 0.25
        try:
            yield StageEvent("thinker", StageChunk(token_ids=(1,), text=text, prompt_token_ids=(1, 2)))
            if text in self.held:
                async with deadline.kept():
                    await self.held[text].wait()
            start = 0
            for word in text.split():
                if word == BROKEN:
                    raise StageDied("a stage broke")
                samples = np.full(100 * len(word), loud * ord(word[0]) / 256, np.float32)
                self.made[text] += 1
                yield StageEvent("code2wav", StageChunk(audio=AudioChunk(start, samples, RATE_HZ)))
                start += len(samples)
            yield StageEvent("thinker", StageChunk(token_start=1, finish_reason="stop"))
        finally:
            self.running -= 1


@dataclass
class Sentence:
    """What came of one, from `audio.start` to `audio.done`."""

    start: dict[str, Any]
    frames: list[bytes] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    done: dict[str, Any] = field(default_factory=dict)

    @property
    def sound(self) -> bytes:
        return b"".join(self.frames)


class Teller:
    """One session."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def tell(self, *pieces: str) -> None:
        for piece in pieces:
            await self.send("input.text", text=piece)

    async def next(self) -> Any:
        """An event, or the bytes of a frame."""
        message = await asyncio.wait_for(self.socket.recv(), PATIENCE_S)
        return json.loads(message) if isinstance(message, str) else message

    async def sentence(self) -> Sentence:
        heard = Sentence(await self.next())
        assert heard.start["type"] == "audio.start", heard.start
        while not heard.done:
            message = await self.next()
            if isinstance(message, bytes):
                heard.frames.append(message)
            elif message["type"] == "error":
                heard.errors.append(message)
            else:
                assert message["type"] == "audio.done", message
                heard.done = message
        return heard

    async def text(self) -> list[Sentence]:
        """Those that come until the text is done."""
        await self.send("input.done")
        sentences = []
        while (message := await self.next())["type"] != "session.done":
            heard = Sentence(message)
            while isinstance(message := await self.next(), bytes):
                heard.frames.append(message)
            heard.done = message
            assert (heard.start["type"], heard.done["type"]) == ("audio.start", "audio.done")
            sentences.append(heard)
        assert message["total_sentences"] == (sentences[-1].start["sentence_index"] + 1 if sentences else 0)
        return sentences

    async def refused(self) -> dict[str, Any]:
        message = await self.next()
        assert message["type"] == "error", message
        return dict(message)

    async def closed(self) -> int:
        """The code that the server closes with, next."""
        await asyncio.wait_for(self.socket.wait_closed(), PATIENCE_S)
        return int(self.socket.close_code or 0)


@asynccontextmanager
async def telling(url: str, headers: Mapping[str, str] | None = None, **config: Any) -> AsyncIterator[Teller]:
    """A session with its settings; `url` as clients of HTTP have it."""
    async with connect(url.replace("http", "ws", 1) + PATH, additional_headers=headers, max_size=None) as socket:
        teller = Teller(socket)
        await teller.send("session.config", **config)
        yield teller


@dataclass
class Stage:
    """A server and what it is made of."""

    url: str
    http: HttpServer
    reciter: Reciter


@asynccontextmanager
async def stage(folder: Path, limits: Limits | None = None, **api: Any) -> AsyncIterator[Stage]:
    reciter = Reciter(config_of(folder, limits, **api))
    http = HttpServer(reciter)
    with listening("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(http.app(), lifespan="off", log_config=None))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield Stage(f"http://127.0.0.1:{listener.getsockname()[1]}", http, reciter)
        finally:
            server.should_exit = True
            await task
            await http.close()
