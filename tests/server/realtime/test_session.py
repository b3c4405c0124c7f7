"""Realtime sessions over a pipeline that says one word and a second of silence."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from omni_cluster.config.limits import Limits
from omni_cluster.openai_api.realtime.items import PART_BYTES
from omni_cluster.types.errors import NotFinite
from omni_cluster.types.outputs import CallDelta
from tests.server.keyed import ONE
from tests.server.realtime.room import closable, room, talking
from tests.server.realtime.talk import kinds, sound_of, talk, text_of
from tests.server.speaker import RATE_HZ

pytestmark = pytest.mark.usefixtures("tiny")


def pcm(seconds: float) -> str:
    return base64.b64encode(bytes(int(seconds * RATE_HZ) * 2)).decode()


async def test_a_session_says_what_it_is_and_how_it_was_changed(tmp_path: Path) -> None:
    async with room(tmp_path) as there, talk(there.url) as client:
        session = (await client.until("session.created"))[-1]["session"]
        assert session["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 24_000}
        assert session["audio"]["output"]["voice"] == "Chelsie" and session["output_modalities"] == ["audio"]
        changed = await client.update(
            instructions="Be brief.",
            tracing="auto",
            audio={
                "input": {
                    "turn_detection": {"type": "semantic_vad", "eagerness": "high"},
                    "transcription": {"model": "gpt-4o-mini-transcribe"},
                    "noise_reduction": {"type": "near_field"},
                },
                "output": {"voice": "marin"},
            },
        )
        assert changed["instructions"] == "Be brief." and changed["audio"]["output"]["voice"] == "Chelsie"
        assert changed["audio"]["input"]["turn_detection"]["eagerness"] == "high"
        assert changed["audio"]["input"]["transcription"]["model"] == "gpt-4o-mini-transcribe"
        changed = await client.update(audio={"input": {"turn_detection": None}, "output": {"voice": {"id": "ethan"}}})
        assert changed["audio"]["input"]["turn_detection"] is None
        assert changed["audio"]["input"]["transcription"]["model"] == "gpt-4o-mini-transcribe"
        assert changed["audio"]["output"]["voice"] == "Ethan" and changed["instructions"] == "Be brief."


async def test_an_answer_s_events_come_in_openais_order(tmp_path: Path) -> None:
    async with talking(tmp_path) as (client, _):
        await client.say("Hello")
        events = await client.answer(metadata={"mine": "1"})
        assert kinds(events) == [
            "response.created",
            "response.output_item.added",
            "conversation.item.added",
            "response.content_part.added",
            "response.output_audio_transcript.delta",
            "response.output_audio.delta",
            "response.output_audio.done",
            "response.output_audio_transcript.done",
            "response.content_part.done",
            "response.output_item.done",
            "conversation.item.done",
            "response.done",
        ]
        assert text_of(events) == "word" and len(sound_of(events)) == RATE_HZ
        assert events[0]["response"]["metadata"] == {"mine": "1"}
        done = events[-1]["response"]
        assert (done["status"], done["usage"]["input_tokens"], done["usage"]["output_tokens"]) == ("completed", 2, 1)
        assert done["output"][0]["content"] == [{"type": "output_audio", "transcript": "word"}]
        assert len({event["event_id"] for event in client.told}) == len(client.told)


async def test_a_text_answer_has_no_sound(tmp_path: Path) -> None:
    async with talking(tmp_path) as (client, _):
        await client.update(output_modalities=["text"])
        await client.say("Hello")
        events = await client.answer()
        assert [kind for kind in kinds(events) if "audio" in kind] == []
        assert events[-1]["response"]["output"][0]["content"] == [{"type": "output_text", "text": "word"}]


async def test_a_response_that_is_cancelled_ends_in_all_stages_and_says_all_ends(tmp_path: Path) -> None:
    async with talking(tmp_path) as (client, speaker):
        speaker.may_speak.clear()
        await client.say("Hello")
        await client.send("response.create")
        await client.until("response.output_audio_transcript.delta")
        await client.send("response.create", event_id="second")
        error = await client.refused()
        assert (error["code"], error["event_id"]) == ("conversation_already_has_active_response", "second")
        await client.send("response.cancel")
        events = await client.until("response.done")
        response = events[-1]["response"]
        assert response["status"] == "cancelled" and response["status_details"]["reason"] == "client_cancelled"
        assert response["output"][0]["status"] == "incomplete" and speaker.running == 0
        await client.send("response.cancel")
        error = await client.refused()
        assert error["code"] == "response_cancel_not_active" and error["message"].startswith("Cancellation failed")
        speaker.may_speak.set()
        assert (await client.answer())[-1]["response"]["status"] == "completed"


async def test_a_client_that_leaves_ends_its_response_in_all_stages(tmp_path: Path) -> None:
    async with room(tmp_path) as there:
        there.speaker.may_speak.clear()
        async with talk(there.url) as client:
            await client.say("Hello")
            await client.send("response.create")
            await client.until("response.output_audio_transcript.delta")
            assert there.speaker.running == 1
        async with asyncio.timeout(60):
            while there.speaker.running:
                await asyncio.sleep(0.01)


async def test_sound_that_is_pushed_becomes_an_item_when_it_is_committed(tmp_path: Path) -> None:
    async with talking(tmp_path) as (client, _):
        await client.update(audio={"input": {"turn_detection": None}})
        await client.send("input_audio_buffer.commit")
        assert (await client.refused())["code"] == "input_audio_buffer_commit_empty"
        await client.send("input_audio_buffer.append", audio=pcm(0.3))
        await client.send("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        for _ in range(5):
            await client.send("input_audio_buffer.append", audio=pcm(0.1))
        await client.send("input_audio_buffer.commit")
        events = await client.until("conversation.item.done")
        assert kinds(events) == ["input_audio_buffer.committed", "conversation.item.added", "conversation.item.done"]
        item = events[-1]["item"]
        assert item["id"] == events[0]["item_id"] and item["content"][0]["type"] == "input_audio"
        await client.send("input_audio_buffer.append", audio="AAA")
        assert "base64" in (await client.refused())["message"]
        await client.send("input_audio_buffer.append", audio="AAAA")
        assert "has 3 bytes" in (await client.refused())["message"]


async def test_sound_for_which_an_item_has_no_room_is_refused_before_it_is_committed(tmp_path: Path) -> None:
    async with talking(tmp_path, Limits(max_session_bytes=PART_BYTES + 16_000 * 4)) as (client, _):
        await client.update(audio={"input": {"turn_detection": None}})
        await client.send("input_audio_buffer.append", audio=pcm(1.001))
        assert (await client.refused())["code"] == "audio_too_long"
        await client.send("input_audio_buffer.append", audio=pcm(1.0))
        await client.send("input_audio_buffer.commit")
        await client.until("conversation.item.done")


async def test_items_have_their_places_and_ids(tmp_path: Path) -> None:
    async with talking(tmp_path) as (client, _):
        second = await client.say("two", id="2nd")
        assert second["previous_item_id"] is None and second["item"]["id"] == "2nd"
        message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]}
        first = await client.create({**message, "id": "1st"}, previous_item_id="root")
        assert first["previous_item_id"] is None
        third = await client.create({**message, "id": "3rd"}, previous_item_id="2nd")
        assert third["previous_item_id"] == "2nd"
        await client.send("conversation.item.create", item={**message, "id": "2nd"})
        assert (await client.refused())["code"] == "item_create_duplicate_item_id"
        await client.send("conversation.item.retrieve", item_id="1st")
        retrieved = (await client.until("conversation.item.retrieved"))[-1]["item"]
        assert retrieved["content"] == [{"type": "input_text", "text": "one"}]
        await client.send("conversation.item.delete", item_id="1st")
        await client.until("conversation.item.deleted")
        await client.send("conversation.item.retrieve", item_id="1st")
        assert (await client.refused())["code"] == "item_retrieve_invalid_item_id"


async def test_an_answer_out_of_band_leaves_no_trace_in_the_conversation(tmp_path: Path) -> None:
    async with talking(tmp_path) as (client, _):
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Sum it up."}]}
        events = await client.answer(conversation="none", input=[item], output_modalities=["text"], metadata={"a": "b"})
        assert text_of(events) == "word" and "conversation.item.added" not in kinds(events)
        assert (await client.say("Hello"))["previous_item_id"] is None


async def test_an_answer_is_cut_to_what_was_heard_at_a_word(tmp_path: Path) -> None:
    async with talking(tmp_path) as (client, _):
        await client.say("Hello")
        item_id = (await client.answer())[-1]["response"]["output"][0]["id"]
        for heard_ms in (500, 0, 10_000):  # clients round up, beyond the end too
            await client.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=heard_ms)
            assert (await client.until("conversation.item.truncated"))[-1]["audio_end_ms"] == heard_ms
        await client.send("conversation.item.truncate", item_id="none", content_index=0, audio_end_ms=0)
        assert (await client.refused())["code"] == "item_truncate_invalid_item_id"


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"type": "session.updat"}, 'type is "session.updat", but the events of a client are'),
        ({}, "type is null"),
        ({"type": "session.update", "session": {"output_modalities": ["text", "audio"]}}, "output_modalities is"),
        (
            {
                "type": "session.update",
                "session": {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 16000}}}},
            },
            "audio.input.format.rate is 16000, but it should be 24000",
        ),
        (
            {"type": "session.update", "session": {"audio": {"input": {"turn_detection": {"type": "vad"}}}}},
            "should have the type 'server_vad' or 'semantic_vad'",
        ),
        ({"type": "conversation.item.create", "item": {"type": "mcp"}}, 'item.type is "mcp"'),
        ({"type": "conversation.item.truncate", "item_id": "x", "audio_end_ms": -1}, "audio_end_ms is -1"),
        (
            {"type": "conversation.item.truncate", "item_id": "x", "audio_end_ms": 10**400},
            "but it should be less than or equal to 9007199254740992",
        ),
        ({"type": "response.create", "response": {"max_output_tokens": 5000}}, "should be 1 to 4096, or 'inf'"),
        ({"type": "response.create"}, "The conversation has no items"),
    ],
)
async def test_what_is_wrong_is_said_in_a_sentence_and_the_session_goes_on(
    tmp_path: Path, event: dict[str, Any], words: str
) -> None:
    async with talking(tmp_path) as (client, _):
        await client._connection.send({"event_id": "mine", **event})
        error = (await client.until("error"))[-1]["error"]
        assert words in error["message"] and error["message"].endswith(".")
        await client.say("Hello")


async def test_a_call_is_whole_when_the_next_begins_whatever_becomes_of_that(tmp_path: Path) -> None:
    async with talking(tmp_path) as (client, speaker):
        tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
        await client.update(tools=[tool])
        speaker.calls = (CallDelta(0, "call_1", "look", "{}"), CallDelta(1, "call_2", "look", '{"at'))
        await client.say("Look twice.")
        events = await client.answer()
        items = [(event["type"], event["item"]) for event in events if event["type"].startswith("response.output_item")]
        assert [(kind.rpartition(".")[2], item["call_id"], item["status"]) for kind, item in items] == [
            ("added", "call_1", "in_progress"),
            ("done", "call_1", "completed"),
            ("added", "call_2", "in_progress"),
            ("done", "call_2", "incomplete"),
        ]
        assert events[-1]["response"]["status"] == "incomplete"


async def test_a_client_may_ask_for_one_call_at_a_time(tmp_path: Path) -> None:
    async with talking(tmp_path) as (client, speaker):
        tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
        updated = await client.update(tools=[tool], parallel_tool_calls=False)
        assert updated["parallel_tool_calls"] is False
        await client.say("Look once.")
        await client.answer()
        assert speaker.tool_use is not None and not speaker.tool_use.is_parallel
        await client.answer(parallel_tool_calls=True)
        assert speaker.tool_use.is_parallel


async def test_a_stage_that_breaks_ends_the_answer_and_the_session_goes_on(tmp_path: Path) -> None:
    async with talking(tmp_path) as (client, speaker):
        speaker.breaks = NotFinite("sound is no number; send the request with another seed.")
        await client.say("Hello")
        events = await client.answer()
        assert kinds(events)[-6:] == [
            "response.output_audio.done",
            "response.output_audio_transcript.done",
            "response.content_part.done",
            "response.output_item.done",
            "conversation.item.done",
            "response.done",
        ]
        done = events[-1]["response"]
        assert (done["status"], done["status_details"]["type"]) == ("failed", "failed")
        error = await client.refused()
        assert error["message"] == "sound is no number; send the request with another seed."
        assert error["code"] == done["status_details"]["error"]["code"] == "not_finite"
        speaker.breaks = None
        assert len(sound_of(await client.answer())) == RATE_HZ


async def test_sessions_are_counted_apart_and_one_too_many_is_told_to_come_again(tmp_path: Path) -> None:
    limits = Limits(max_sessions=1, max_ongoing_requests=1, max_queued_requests=0)
    async with room(tmp_path, limits) as there, talk(there.url) as client:
        await client.until("session.created")
        async with talk(there.url) as other:
            assert (await other.refused())["code"] == "too_many_sessions"
            with pytest.raises(ConnectionClosed) as closed:
                await other.next()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1013
        await client.say("Hello")
        assert text_of(await client.answer()) == "word"


async def test_a_session_ends_when_its_time_is_over(tmp_path: Path) -> None:
    async with room(tmp_path, Limits(max_session_s=0.5)) as there, talk(there.url) as client:
        assert (await client.refused())["code"] == "session_expired"  # behind what a busy machine said until then
        with pytest.raises(ConnectionClosed) as closed:
            await client.next()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001


async def test_a_server_that_closes_ends_idle_sessions_and_lets_an_answer_finish(tmp_path: Path) -> None:
    async with closable(tmp_path) as (server, speaker, url), talk(url) as idle, talk(url) as answered:
        for client in (idle, answered):
            await client.until("session.created")
        await answered.say("Hello")
        speaker.may_speak.clear()
        await answered.send("response.create")
        await answered.until("response.output_audio_transcript.delta")
        closing = asyncio.create_task(server.let_all_end())
        assert (await idle.refused())["code"] == "server_closing"
        speaker.may_speak.set()
        assert (await answered.until("response.done"))[-1]["response"]["status"] == "completed"
        assert (await answered.refused())["code"] == "server_closing"
        for client in (idle, answered):
            with pytest.raises(ConnectionClosed) as closed:
                await client.next()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
        await closing


async def test_a_key_comes_by_header_or_by_a_browsers_subprotocol(tmp_path: Path) -> None:
    async with room(tmp_path, requests_per_minute=10.0) as there:
        async with talk(there.url, ONE) as client:
            await client.until("session.created")
        url = there.url.replace("http", "ws") + "/v1/realtime"
        names: Any = ["realtime", f"openai-insecure-api-key.{ONE}"]
        async with connect(url, subprotocols=names) as socket:
            assert socket.subprotocol == "realtime" and b"session.created" in bytes(await socket.recv(decode=False))
        with pytest.raises(InvalidStatus) as refused:
            await connect(url, subprotocols=names[:1])
        assert refused.value.response.status_code == 401
