"""Turns that voice activity detection finds, over a pipeline that says one word and a second of silence."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_cluster.server.realtime.outlet import Outlet
from tests.server.realtime.room import talking
from tests.server.realtime.spoken import listening, sentences, silence, speak, until
from tests.server.realtime.talk import Talk, kinds, sound_of, text_of
from tests.server.speaker import RATE_HZ, Speaker

pytestmark = pytest.mark.usefixtures("tiny")


async def test_a_turn_is_found_committed_and_answered(tmp_path: Path) -> None:
    first, _ = sentences()
    async with talking(tmp_path) as (client, _):
        await speak(client, silence(1.0), first, silence(0.8))
        events = await client.until("response.done")
        assert kinds(events)[:6] == [
            "input_audio_buffer.speech_started",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
            "response.created",
        ]
        started, stopped, committed = events[:3]
        assert started["item_id"] == stopped["item_id"] == committed["item_id"] == events[4]["item"]["id"]
        spoken_ms = len(first) * 1000 // RATE_HZ
        assert 1000 - 300 - 100 < started["audio_start_ms"] < 1000
        assert 1000 + spoken_ms < stopped["audio_end_ms"] < 1000 + spoken_ms + 800
        assert text_of(events) == "word" and len(sound_of(events)) == RATE_HZ


async def test_speech_ends_the_answer_that_is_spoken_and_the_client_hears_of_it_first(tmp_path: Path) -> None:
    first, second = sentences()
    async with talking(tmp_path) as (client, speaker):
        speaker.may_speak.clear()
        await speak(client, first, silence(0.8))
        await client.until("response.output_audio_transcript.delta")
        await speak(client, second)
        events = await client.until("response.done")
        assert kinds(events)[0] == "input_audio_buffer.speech_started"
        response = events[-1]["response"]
        assert (response["status"], response["status_details"]["reason"]) == ("cancelled", "turn_detected")
        speaker.may_speak.set()
        await speak(client, silence(0.8))
        assert (await client.until("response.done"))[-1]["response"]["status"] == "completed"
        assert speaker.running == 0


async def test_nothing_of_an_answer_comes_behind_the_speech_that_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sentences()
    async with talking(tmp_path) as (client, speaker):
        plain = Outlet.send

        async def slowly(self: Outlet, kind: str, **fields: Any) -> int:
            """As to a client that takes nothing until the pipeline has come to rest."""
            sent = await plain(self, kind, **fields)
            if kind == "input_audio_buffer.speech_started":
                speaker.may_speak.set()
                await until(lambda: speaker.running == 0)
            return sent

        speaker.may_speak.clear()
        await speak(client, first, silence(0.8))
        await client.until("response.output_audio_transcript.delta")
        monkeypatch.setattr(Outlet, "send", slowly)
        await speak(client, second)
        events = await client.until("response.done")
        assert kinds(events)[0] == "input_audio_buffer.speech_started"
        assert "response.output_audio.delta" not in kinds(events)
        assert events[-1]["response"]["status_details"]["reason"] == "turn_detected"


async def test_an_answer_goes_on_where_speech_is_not_to_interrupt_it(tmp_path: Path) -> None:
    first, second = sentences()
    async with talking(tmp_path) as (client, speaker):
        await listening(client, interrupt_response=False)
        speaker.may_speak.clear()
        await speak(client, first, silence(0.8))
        await client.until("response.output_audio_transcript.delta")
        await speak(client, second, silence(0.8))
        await client.until("conversation.item.done")
        speaker.may_speak.set()
        assert (await client.until("response.done"))[-1]["response"]["status"] == "completed"


async def begun_early(client: Talk, speaker: Speaker, *parts: np.ndarray) -> None:
    """Speech, and a pause that may be the end of a turn."""
    count = len(speaker.begun)
    await speak(client, *parts, silence(0.35))
    await until(lambda: len(speaker.begun) > count)


async def test_an_answer_that_begins_in_a_pause_is_said_when_the_turn_is_over(tmp_path: Path) -> None:
    first, _ = sentences()
    async with talking(tmp_path) as (client, speaker):
        await begun_early(client, speaker, first)
        await until(lambda: speaker.running == 0)  # the whole answer is there
        await speak(client, silence(0.5))
        events = await client.until("response.done")
        assert kinds(events)[1:3] == ["input_audio_buffer.speech_stopped", "input_audio_buffer.committed"]
        assert text_of(events) == "word" and events[-1]["response"]["status"] == "completed"
        assert len(speaker.begun) == 1
        assert (await client.say("And now?"))["previous_item_id"] == events[-1]["response"]["output"][0]["id"]


async def test_speech_that_goes_on_takes_an_early_answer_back_without_a_trace(tmp_path: Path) -> None:
    first, second = sentences()
    async with talking(tmp_path) as (client, speaker):
        await begun_early(client, speaker, first)
        await speak(client, second, silence(0.8))
        events = await client.until("response.done")
        names = [event["type"] for event in events]
        assert names.count("input_audio_buffer.speech_started") == names.count("response.created") == 1
        items = [event["item"]["id"] for event in events if event["type"] == "conversation.item.done"]
        assert items == [events[0]["item_id"], events[-1]["response"]["output"][0]["id"]]
        assert len(speaker.begun) >= 2 and speaker.running == 0


async def test_what_changes_the_session_takes_an_early_answer_back(tmp_path: Path) -> None:
    first, _ = sentences()
    async with talking(tmp_path) as (client, speaker):
        await begun_early(client, speaker, first)
        await client.update(instructions="Be brief.")
        assert speaker.running == 0
        await speak(client, silence(0.5))
        assert (await client.until("response.done"))[-1]["response"]["status"] == "completed"
        assert len(speaker.begun) == 2


async def test_a_turn_is_written_down_after_the_first_sound_of_its_answer(tmp_path: Path) -> None:
    first, _ = sentences()
    async with talking(tmp_path) as (client, _):
        await client.update(audio={"input": {"transcription": {"model": "whisper-1", "language": "en"}}})
        await speak(client, first, silence(0.8))
        events = await client.until("conversation.item.input_audio_transcription.completed")
        names = kinds(events)
        assert names.index("response.output_audio.delta") < names.index(
            "conversation.item.input_audio_transcription.delta"
        )
        assert (events[-1]["transcript"], events[-1]["item_id"]) == ("word", events[0]["item_id"])
        await client.send("conversation.item.retrieve", item_id=events[0]["item_id"])
        retrieved = (await client.until("conversation.item.retrieved"))[-1]["item"]
        assert retrieved["content"][0]["transcript"] == "word"


async def test_a_transcription_in_no_language_fails_alone(tmp_path: Path) -> None:
    first, _ = sentences()
    async with talking(tmp_path) as (client, _):
        await client.update(audio={"input": {"transcription": {"language": "xx"}}})
        await speak(client, first, silence(0.8))
        failed = (await client.until("conversation.item.input_audio_transcription.failed"))[-1]
        assert "xx" in failed["error"]["message"].lower()


@pytest.mark.full
async def test_a_client_that_stays_silent_is_answered_once_the_answer_was_played(tmp_path: Path) -> None:
    first, _ = sentences()
    async with talking(tmp_path) as (client, _):
        await listening(client, idle_timeout_ms=5_000)
        await speak(client, first, silence(0.8))
        await client.until("response.done")
        answered_s = time.monotonic()
        await speak(client, silence(0.5))
        triggered, committed, *events = await client.until("response.done")
        assert triggered["type"] == "input_audio_buffer.timeout_triggered"
        assert time.monotonic() - answered_s > 5.0
        assert triggered["item_id"] == committed["item_id"] == events[1]["item"]["id"]
        assert triggered["audio_end_ms"] > triggered["audio_start_ms"]
        assert text_of(events) == "word"


@pytest.mark.full
async def test_speech_ends_the_wait_for_a_silent_client(tmp_path: Path) -> None:
    first, second = sentences()
    async with talking(tmp_path) as (client, speaker):
        await listening(client, idle_timeout_ms=5_000, interrupt_response=True)
        await speak(client, first, silence(0.8))
        await client.until("response.done")
        speaker.may_speak.clear()
        await speak(client, second, silence(0.8))
        await client.until("response.output_audio_transcript.delta")
        await asyncio.sleep(6.5)
        assert "input_audio_buffer.timeout_triggered" not in {event["type"] for event in client.told}
        speaker.may_speak.set()
        assert "input_audio_buffer.timeout_triggered" not in kinds(await client.until("response.done"))
