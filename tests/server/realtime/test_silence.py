"""The wait for a silent client: none begins while the client speaks, and one that cannot be answered is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_cluster.server.realtime import session
from omni_cluster.server.realtime.session import RealtimeSession
from tests.server.realtime.room import talking
from tests.server.realtime.spoken import listening, sentences, silence, speak
from tests.server.realtime.talk import Talk

pytestmark = pytest.mark.usefixtures("tiny", "no_wait")
TIMEOUT = "input_audio_buffer.timeout_triggered"


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that begins is over at once, so that what begins one by mistake is seen."""
    answered = RealtimeSession._answer_silence

    async def at_once(self: RealtimeSession, wait_s: float) -> None:
        assert wait_s >= 5
        await answered(self, 0.0)

    monkeypatch.setattr(RealtimeSession, "_answer_silence", at_once)


def told(client: Talk) -> list[str]:
    return [event["type"] for event in client.told]


async def test_speech_that_ends_an_answer_begins_no_wait(tmp_path: Path) -> None:
    first, second = sentences()
    async with talking(tmp_path) as (client, speaker):
        await listening(client, idle_timeout_ms=5_000)
        speaker.may_speak.clear()
        await speak(client, first, silence(0.8))
        await client.until("response.output_audio_transcript.delta")
        await speak(client, second, silence(0.8))
        assert (await client.until("response.done"))[-1]["response"]["status"] == "cancelled"
        await client.until("response.output_audio_transcript.delta")
        assert TIMEOUT not in told(client) and told(client).count("input_audio_buffer.committed") == 2


async def test_speech_that_ends_an_answer_within_one_event_begins_no_wait(tmp_path: Path) -> None:
    first, second = sentences()
    async with talking(tmp_path) as (client, speaker):
        await listening(client, idle_timeout_ms=5_000, create_response=False)
        speaker.may_speak.clear()
        await speak(client, first, silence(0.8))
        await client.until("conversation.item.done")
        await client.send("response.create")
        await client.until("response.output_audio_transcript.delta")
        await speak(client, second, silence(0.8), piece_s=60)
        await client.until("response.done")
        await client.until("conversation.item.done")
        await client.say("And this.")
        assert TIMEOUT not in told(client)


async def test_an_answer_that_ends_while_the_client_speaks_begins_no_wait(tmp_path: Path) -> None:
    first, second = sentences()
    async with talking(tmp_path) as (client, speaker):
        await listening(client, idle_timeout_ms=5_000, interrupt_response=False)
        speaker.may_speak.clear()
        await speak(client, first, silence(0.8))
        await client.until("response.output_audio_transcript.delta")
        await speak(client, second)
        await client.until("input_audio_buffer.speech_started")
        speaker.may_speak.set()
        assert (await client.until("response.done"))[-1]["response"]["status"] == "completed"
        speaker.may_speak.clear()
        await speak(client, silence(0.8))
        await client.until("response.output_audio_transcript.delta")
        assert TIMEOUT not in told(client) and told(client).count("input_audio_buffer.committed") == 2


async def test_silence_that_finds_no_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MOST_ITEMS", 2)
    first, _ = sentences()
    async with talking(tmp_path) as (client, _):
        await client.update(truncation="disabled")
        await listening(client, idle_timeout_ms=5_000)
        await speak(client, first, silence(0.8))
        await client.until("response.done")
        assert (await client.refused())["code"] == "conversation_full"
        assert told(client)[-2] == TIMEOUT
