"""What sessions leave behind when they end: nothing."""

from __future__ import annotations

import asyncio
import base64
import gc
from pathlib import Path

import pytest

from omni_cluster.server.realtime import session
from omni_cluster.server.realtime.input_buffer import InputBuffer
from omni_cluster.server.realtime.response import Answer, Response
from omni_cluster.server.realtime.session import RealtimeSession
from omni_cluster.server.realtime.voice_activity import SpeechStream
from tests.server.realtime.room import Room, room
from tests.server.realtime.spoken import sentences
from tests.server.realtime.talk import talk

pytestmark = pytest.mark.usefixtures("tiny")
# Compared with `type`: other tests' weak proxies are among all objects, and isinstance asks what they stand for.
OF_A_SESSION = (RealtimeSession, Response, InputBuffer, SpeechStream)


async def test_sessions_leave_no_object_behind_however_they_end(tmp_path: Path) -> None:
    async with room(tmp_path) as there:
        await asyncio.gather(*(answered(there) for _ in range(4)))
        await asyncio.gather(*(left_while_it_speaks(there) for _ in range(4)))
        async with asyncio.timeout(60):
            while left := [each for each in gc.get_objects() if type(each) in OF_A_SESSION]:
                left.clear()
                gc.collect()
                await asyncio.sleep(0.01)


async def test_a_session_forgets_answers_that_have_left_its_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MOST_ITEMS", 4)
    async with room(tmp_path) as there, talk(there.url) as client:
        await client.until("session.created")
        for _ in range(5):
            await client.say("Hello.")
            assert (await client.answer())[-1]["type"] == "response.done"
        gc.collect()
        kept = [each for each in gc.get_objects() if type(each) is Answer]
        assert 1 <= len(kept) <= 3, "two of four items, and the one that is added"


async def answered(there: Room) -> None:
    async with talk(there.url) as client:
        await client.until("session.created")
        await client.say("Hello.")
        assert (await client.answer())[-1]["type"] == "response.done"


async def left_while_it_speaks(there: Room) -> None:
    """The turn has begun, and does not end."""
    async with talk(there.url) as client:
        await client.until("session.created")
        spoken = base64.b64encode(sentences()[0].tobytes()).decode()
        await client.send("input_audio_buffer.append", audio=spoken)
        await client.until("input_audio_buffer.speech_started")
