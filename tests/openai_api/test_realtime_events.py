"""What clients of realtime sessions send: events, and the settings of a session."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.realtime import client_events as asked
from omni_cluster.openai_api.realtime.client_events import EventRefused, client_event
from omni_cluster.openai_api.realtime.session import ResponseAsked, Session, chat_tools

WEATHER = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ({"type": "session.update", "session": {}}, asked.SessionUpdate),
        ({"type": "input_audio_buffer.append", "audio": "AAAA"}, asked.AppendSound),
        ({"type": "input_audio_buffer.commit", "event_id": "mine"}, asked.CommitSound),
        ({"type": "conversation.item.truncate", "item_id": "a", "audio_end_ms": 0, "more": 1}, asked.TruncateItem),
        ({"type": "response.create"}, asked.CreateResponse),
        ({"type": "response.cancel", "response_id": None}, asked.CancelResponse),
    ],
)
def test_an_event_is_read_by_its_type(event: dict[str, Any], kind: type) -> None:
    read = client_event(json.dumps(event))
    assert type(read) is kind and read.event_id == event.get("event_id")


@pytest.mark.parametrize(
    ("text", "words", "event_id"),
    [
        ("", "is not a JSON object", None),
        ("[]", "is not a JSON object", None),
        ("[" * 900, "The event is nested deeper than 200 levels", None),
        ("1" * 5000, "The event has a number of more than 4300 digits", None),
        ('{"type": "session.update", "session": {"tracing": [{"a": 1e999}]}}', "a number that is not finite", None),
        ('{"type": "session.update", "session": {"tracing": NaN}}', "a number that is not finite", None),
        ('{"type": 5, "event_id": "a"}', "type is 5, but the events of a client are session.update", "a"),
        ('{"type": "response.cancel", "event_id": "a", "response_id": ""}', "response_id is", "a"),
        ('{"type": "input_audio_buffer.append"}', "audio is required.", None),
        ('{"type": "session.update", "session": [], "event_id": 7}', "event_id is 7", None),
        ('{"a": [' + "1," * 70_000 + "1]}", "more than 65536 commas", None),
    ],
)
def test_what_is_no_event_is_refused_by_the_client_s_name_of_it(text: str, words: str, event_id: str | None) -> None:
    with pytest.raises(EventRefused) as refused:
        client_event(text)
    assert words in refused.value.message and refused.value.event_id == event_id


def test_an_update_goes_into_objects_and_replaces_what_is_chosen_whole() -> None:
    session = Session().updated(
        {
            "instructions": "Be brief.",
            "audio": {
                "input": {"turn_detection": {"type": "server_vad", "threshold": 0.7}, "format": {"type": "audio/pcmu"}},
                "output": {"voice": {"id": "marin"}},
            },
        }
    )
    assert session.audio.input.format.sample_rate_hz == 8_000 and session.audio.output.format.sample_rate_hz == 24_000
    assert session.audio.output.voice == "marin" and session.instructions == "Be brief."
    detection = {"type": "server_vad", "silence_duration_ms": 200}
    session = session.updated({"audio": {"input": {"turn_detection": detection}}})
    assert session.model_dump()["audio"]["input"]["turn_detection"]["threshold"] == 0.5
    assert session.audio.input.format.type == "audio/pcmu"


def test_null_clears_a_setting() -> None:
    session = Session().updated({"instructions": "Be brief.", "tools": [WEATHER], "tool_choice": "required"})
    cleared = {"instructions": None, "tools": None, "tool_choice": None, "audio": {"input": {"turn_detection": None}}}
    session = session.updated(cleared)
    assert (session.instructions, session.tools, session.tool_choice) == ("", [], "auto")
    assert session.audio.input.turn_detection is None
    assert session.updated({"audio": None}) == Session()


@pytest.mark.parametrize(
    ("session", "words"),
    [
        ({"type": "transcription"}, "type is"),
        ({"output_modalities": []}, "should be ['audio'], which comes with its text, or ['text']"),
        ({"max_output_tokens": 0}, "should be 1 to 4096, or 'inf'"),
        ({"max_output_tokens": "many"}, "should be 1 to 4096, or 'inf'"),
        ({"tool_choice": "any"}, "tool_choice is"),
        ({"tool_choice": 5}, "should be 'none', 'auto', 'required' or"),
        ({"truncation": 5}, "should be 'auto', 'disabled' or"),
        ({"audio": {"input": {"format": {"type": "audio/mp3"}}}}, "audio.input.format is"),
        (
            {"audio": {"input": {"turn_detection": {"type": "server_vad", "threshold": 2}}}},
            "turn_detection.threshold is 2",
        ),
        ({"audio": {"output": {"speed": 3}}}, "audio.output.speed is 3"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].type is"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_path(session: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        Session().updated(session)
    assert words in refused.value.message


def test_a_response_asks_for_what_differs_from_the_session() -> None:
    session = Session().updated({"instructions": "Be brief.", "tools": [WEATHER], "max_output_tokens": 5})
    response = ResponseAsked.of(session, {"output_modalities": ["text"], "metadata": {"a": "b"}, "tools": None})
    assert not response.wants_sound and response.max_tokens == 5 and response.instructions == "Be brief."
    assert (response.conversation, response.metadata) == ("auto", {"a": "b"})
    assert ResponseAsked.of(session, None).wants_sound and Session().max_tokens is None
    (tool,) = chat_tools(response)
    assert (tool.function.name, tool.function.description) == ("weather", "Of a city.")
    named = session.updated({"tool_choice": {"type": "function", "name": "weather"}, "truncation": "disabled"})
    assert named.model_dump()["tool_choice"] == {"type": "function", "name": "weather"}


def test_a_name_that_no_function_may_have_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"function\.name is"):
        chat_tools(Session().updated({"tools": [{"type": "function", "name": ""}]}))
