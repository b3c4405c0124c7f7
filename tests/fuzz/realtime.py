"""Conversations on a WebSocket: events of a client, of which some are changed, against the whole API over a speaker."""

from __future__ import annotations

import asyncio
import base64
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from starlette.types import ASGIApp, Message

from omni_cluster.models.qwen2_5_omni.checkpoint import embedded_checkpoint
from omni_cluster.openai_api.realtime.client_events import MOST_EVENT_BYTES, ROOT
from omni_cluster.server.app import HttpServer
from omni_cluster.server.realtime.voice_activity import speech_model
from tests.fuzz.media import MEDIA
from tests.fuzz.mutate import changed_bytes, changed_values
from tests.server.keyed import config_of
from tests.server.speaker import Speaker

MOST_EVENTS = 12
ENDS_S = 60
CHANGED = 0.4
"""The part of the events that are not as a client would send them."""
KNOWN: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
TOOL = {
    "type": "function",
    "name": "look_up",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
}
VADS: tuple[Any, ...] = (
    None,
    {"type": "server_vad", "silence_duration_ms": 0, "idle_timeout_ms": 5_000},
    {"type": "semantic_vad", "eagerness": "high"},
)
FORMATS = ({"type": "audio/pcm", "rate": 24_000}, {"type": "audio/pcmu"}, {"type": "audio/pcma"})
IDS = ("item_a", "item_b", "item_c")


class Broken(Exception):
    """The server did what no client may meet."""


class SaidAnError(Exception):
    """Of at least one event of a conversation."""


def conversation(rng: Random) -> bytes:
    """Events as JSON, a line each."""
    _server()  # what takes them is there before the time of one is measured
    return b"\n".join(_event(rng) for _ in range(rng.randint(1, MOST_EVENTS)))


def _event(rng: Random) -> bytes:
    event = rng.choice(_EVENTS)(rng)
    if rng.random() < CHANGED:
        event = changed_values(event, rng)
    # No proxy carries a larger one.
    data = json.dumps(event).encode("utf-8", "surrogatepass").replace(b"\n", b" ")[: MOST_EVENT_BYTES + 1]
    return changed_bytes(data, rng).replace(b"\n", b" ") if rng.random() < CHANGED / 10 else data


def _update(rng: Random) -> dict[str, Any]:
    audio_input = {"format": rng.choice(FORMATS), "turn_detection": rng.choice(VADS), "transcription": {"model": "any"}}
    session = {
        "type": "realtime",
        "instructions": "Be brief.",
        "output_modalities": [rng.choice(("audio", "text"))],
        "tools": [TOOL],
        "tool_choice": rng.choice(("auto", "none", {"type": "function", "name": "look_up"})),
        "max_output_tokens": rng.choice((7, "inf")),
        "audio": {"input": audio_input, "output": {"format": rng.choice(FORMATS), "voice": "marin", "speed": 1.0}},
    }
    return {"type": "session.update", "event_id": "mine", "session": session}


def _append(rng: Random) -> dict[str, Any]:
    sound = rng.randbytes(rng.choice((2, 960, 4_800, 48_000)))
    return {"type": "input_audio_buffer.append", "audio": base64.b64encode(sound).decode()}


@cache
def _picture() -> str:
    return "data:image/png;base64," + base64.b64encode(MEDIA["png"]()).decode()


def _message(rng: Random) -> dict[str, Any]:
    parts = (
        {"type": "input_text", "text": "Hello"},
        {"type": "input_audio", "audio": base64.b64encode(rng.randbytes(9_600)).decode()},
        {"type": "input_image", "image_url": _picture()},
    )
    return {"type": "message", "id": rng.choice(IDS), "role": "user", "content": rng.sample(parts, rng.randint(1, 3))}


def _create_item(rng: Random) -> dict[str, Any]:
    items = (
        _message(rng),
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
        {"type": "function_call", "call_id": "call_a", "name": "look_up", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_a", "output": "found"},
    )
    return {
        "type": "conversation.item.create",
        "item": rng.choice(items),
        "previous_item_id": rng.choice((None, ROOT, *IDS)),
    }


def _respond(rng: Random) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "output_modalities": ["text"],
        "conversation": rng.choice(("auto", "none")),
        "metadata": {"a": "b"},
    }
    if rng.random() < 0.3:
        asked["input"] = [{"type": "item_reference", "id": rng.choice(IDS)}, _message(rng)]
    return {"type": "response.create", **({"response": asked} if rng.random() < 0.5 else {})}


def _of_an_item(rng: Random) -> dict[str, Any]:
    kind = rng.choice(("retrieve", "delete", "truncate"))
    more = {"content_index": 0, "audio_end_ms": rng.randrange(2_000)} if kind == "truncate" else {}
    return {"type": f"conversation.item.{kind}", "item_id": rng.choice(IDS), **more}


def _plain(rng: Random) -> dict[str, Any]:
    kinds = ("input_audio_buffer.commit", "input_audio_buffer.clear", "response.cancel", "output_audio_buffer.clear")
    return {"type": rng.choice(kinds), "event_id": "mine"}


_EVENTS = (_update, _append, _append, _create_item, _create_item, _respond, _respond, _of_an_item, _plain)


class Socket:
    """The client's end: it sends its events, checks what comes, and leaves once its responses have ended."""

    def __init__(self, events: Sequence[bytes]) -> None:
        self._events = list(events)
        self._is_open = False
        self._told: Counter[str] = Counter()
        self._changed = asyncio.Event()

    async def receive(self) -> Message:
        if not self._is_open:
            self._is_open = True
            return {"type": "websocket.connect"}
        await asyncio.sleep(0)
        if self._events:
            return {"type": "websocket.receive", "text": self._events.pop(0).decode("utf-8", "replace")}
        while self._told["response.created"] > self._told["response.done"]:
            self._changed.clear()
            await self._changed.wait()
        return {"type": "websocket.disconnect", "code": 1000}

    async def send(self, message: Message) -> None:
        self._changed.set()
        if message["type"] != "websocket.send":
            return
        event = json.loads(message["text"])
        self._told[event["type"]] += 1
        KNOWN.validate_json(message["text"], strict=False)
        if event["type"] == "error" and event["error"]["type"] == "server_error":
            raise Broken(f"the server is told to have failed: {event['error']}")

    async def ends(self, app: ASGIApp) -> None:
        """Raises Broken, or what the server raised."""
        scope = {
            "type": "websocket",
            "path": "/v1/realtime",
            "raw_path": b"/v1/realtime",
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1")],
            "subprotocols": [],
            "client": ("127.0.0.1", 1),
            "state": {},
        }
        async with asyncio.timeout(ENDS_S):
            await app(scope, self.receive, self.send)

    @property
    def was_refused(self) -> bool:
        return self._told["error"] > 0


class _Server:
    """The API, in one event loop for as long as the process lives."""

    def __init__(self) -> None:
        embedded_checkpoint("tiny")
        speech_model()
        self._loop = asyncio.new_event_loop()
        self._speaker = Speaker(config_of(Path(tempfile.mkdtemp())))
        self._app = HttpServer(self._speaker).app()

    def take(self, events: Sequence[bytes]) -> None:
        self._loop.run_until_complete(self._take(events))

    async def _take(self, events: Sequence[bytes]) -> None:
        socket = Socket(events)
        await socket.ends(self._app)
        if self._speaker.running:
            raise Broken(f"{self._speaker.running} responses run after their session.")
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:  # the next conversation is not blamed for them
                task.cancel()
            raise Broken(f"the session left {others}.")
        if socket.was_refused:
            raise SaidAnError


_server = cache(_Server)


def take_conversation(data: bytes) -> None:
    _server().take(data.split(b"\n"))
