"""Requests for speech: what is accepted, and one sentence for what is not."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.speech import SpeechRequest, delta_event, done_event, parse_speech_request


def parse(**fields: Any) -> SpeechRequest:
    body = {"model": "omni", "input": "Hello", **fields}
    return parse_speech_request(json.dumps(body).encode(), models=["omni"], voices=["Chelsie", "Ethan"])


def test_what_is_left_out_has_openais_defaults() -> None:
    assert parse() == SpeechRequest("omni", "Hello", None, "mp3", None, None)
    assert parse(voice=None, speed=1, instructions=None, response_format=None) == parse()


def test_a_voice_is_named_or_has_its_id() -> None:
    asked = parse(voice={"id": "Ethan"}, response_format="opus", stream_format="sse", seed=3, input="x" * 4096)
    assert asked == SpeechRequest("omni", "x" * 4096, "Ethan", "opus", "sse", 3)
    assert parse(voice="Ethan").voice == "Ethan"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"model": "gpt"}, "model", "does not exist; use one of omni"),
        ({"input": ""}, "input", "should not be empty"),
        ({"input": "x" * 4097}, "input", "should have at most 4096 characters"),
        ({"input": None}, "input", "is null, but it should be a valid string"),
        ({"voice": "Bob"}, "voice", "but the voices are Chelsie, Ethan"),
        ({"voice": {"id": "Bob"}}, "voice", "but the voices are Chelsie, Ethan"),
        ({"response_format": "ogg"}, "response_format", "'wav', 'pcm16', 'pcm', 'flac', 'mp3', 'opus' or 'aac'"),
        ({"speed": 2}, "speed", "is 2, but it should be less than or equal to 1"),
        ({"speed": 0.5}, "speed", "is 0.5, but it should be greater than or equal to 1"),
        ({"stream_format": "chunks"}, "stream_format", "should be 'sse' or 'audio'"),
        ({"instructions": "softly"}, "instructions", "is not supported; leave it out"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
    ],
)
def test_a_bad_request_is_told_in_one_sentence(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert words in caught.value.message and caught.value.message.endswith(".")


@pytest.mark.parametrize("body", [b"", b"[]", b"{}"])
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_speech_request(body, models=["omni"], voices=[])


def test_events_are_openais() -> None:
    event = delta_event(b"abc")
    assert (event["type"], base64.b64decode(event["audio"])) == ("speech.audio.delta", b"abc")
    assert done_event(3, 40, "length") == {
        "type": "speech.audio.done",
        "usage": {"input_tokens": 3, "output_tokens": 40, "total_tokens": 43},
        "finish_reason": "length",
    }
