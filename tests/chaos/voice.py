"""A client of the Realtime API: it speaks, takes the answer, and speaks again in the same session."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from omni_cluster.api_client import BadAnswer, Refused
from tests.chaos.told import Told
from tests.server.realtime.spoken import sentences

TURNS = 2
SESSION = {
    "type": "realtime",
    "max_output_tokens": 24,
    "audio": {"input": {"turn_detection": None}, "output": {"voice": "Ethan"}},
}
MOST_EVENT_BYTES = 16 << 20


async def ask_by_voice(url: str, patience_s: float) -> Told:
    """All turns of a session. Their sound is silence as long as it was: its noise is another one each time.

    Raises BadAnswer, Refused and OSError.
    """
    told = Told()
    address = url.replace("http", "ws", 1) + "/v1/realtime"
    try:
        async with connect(address, max_size=MOST_EVENT_BYTES, open_timeout=patience_s) as socket:
            await _send(socket, "session.update", session=SESSION)
            for _ in range(TURNS):
                await _take_turn(socket, told)
    except WebSocketException as error:
        raise BadAnswer(f"the session ended: {error}") from error
    return told


async def _take_turn(socket: ClientConnection, told: Told) -> None:
    for sentence in sentences():
        await _send(socket, "input_audio_buffer.append", audio=base64.b64encode(sentence.tobytes()).decode())
    await _send(socket, "input_audio_buffer.commit")
    await _send(socket, "response.create")
    samples, began_s, last_s = 0, time.monotonic(), None
    async for event in _answer(socket):
        now_s = time.monotonic()
        told.longest_pause_s = max(told.longest_pause_s, 0.0 if last_s is None else now_s - last_s)
        last_s = now_s
        text, sound = _said(event)
        told.heard(text, sound, now_s - began_s)
        samples += len(sound) // 2
    if not samples:
        raise BadAnswer("the spoken answer has no sound.")
    told.sound = np.concatenate([told.sound, np.zeros(samples, np.int16)])


async def _answer(socket: ClientConnection) -> AsyncIterator[dict[str, Any]]:
    """The events of a response, which begin with its first text or sound. Raises BadAnswer and Refused."""
    async for text in socket:
        event = json.loads(text)
        if event["type"] == "error":
            raise Refused(str(event["error"]))
        if event["type"] == "response.done":
            if event["response"]["status"] not in ("completed", "incomplete"):
                raise Refused(f"the response ended: {event['response']['status_details']}")
            return
        if event["type"].endswith(".delta"):
            yield event
    raise BadAnswer("the session ended before its answer did.")


def _said(event: dict[str, Any]) -> tuple[str, bytes]:
    if event["type"] == "response.output_audio.delta":
        return "", base64.b64decode(event["delta"])
    return event["delta"], b""


async def _send(socket: ClientConnection, kind: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind, **fields}))
