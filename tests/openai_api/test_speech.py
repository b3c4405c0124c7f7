"""Requests for speech: what is accepted, and one sentence for what is not."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.limits import ApiDefaults
from omni_cluster.openai_api.speech import SpeechRequest, delta_event, done_event, parse_speech_request


def parse(**fields: Any) -> SpeechRequest:
    body = {"model": "omni", "input": "Hello", **fields}
    defaults = ApiDefaults(sample_rate_hz=24_000)
    return parse_speech_request(
        json.dumps(body).encode(), models=["omni"], voices=["Chelsie", "Ethan"], defaults=defaults
    )


def test_what_is_left_out_has_openais_defaults() -> None:
    assert parse() == SpeechRequest("omni", "Hello", None, "mp3", None, None, sample_rate_hz=24_000)
    assert parse(voice=None, speed=1, instructions=None, response_format=None, seed=-1) == parse()


def test_a_voice_is_named_or_has_its_id() -> None:
    asked = parse(voice={"id": "Ethan"}, response_format="opus", stream_format="sse", seed=3, input="x" * 4096)
    assert asked == SpeechRequest("omni", "x" * 4096, "Ethan", "opus", "sse", 3, sample_rate_hz=24_000)
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
        ({"speed": 2}, "speed", "speed is 2, which is not supported; leave it out or send 1"),
        ({"speed": 0.5}, "speed", "is 0.5, which is not supported"),
        ({"stream_format": "chunks"}, "stream_format", "should be 'sse' or 'audio'"),
        ({"instructions": 5}, "instructions", "should be a valid string"),
        ({"seed": 2**63}, "seed", "less than or equal to 9223372036854775807"),
        ({"sample_rate": 16_000}, "sample_rate", "is 16000, which is not supported; leave it out or send 24000"),
        ({"ref_audio": "data:,"}, "ref_audio", "the voices are the model's own"),
        ({"task_type": "Base"}, "task_type", 'leave it out or send "CustomVoice"'),
        ({"temperature": 0.5}, "temperature", "is 0.5, which is not supported; leave it out"),
        ({"voices": "Ethan"}, "voices", "use voice, or leave it out"),
        ({"voice": "Ethan", "speaker": "Chelsie"}, "speaker", "voice and speaker differ; send one of them"),
    ],
)
def test_a_bad_request_is_told_in_one_sentence(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert words in caught.value.message and caught.value.message.endswith(".")


def test_how_to_speak_is_told_as_ignored() -> None:
    asked = parse(instructions="Softly.", language="Auto")
    assert (asked.ignored, asked.text) == (("instructions", "language"), "Hello")
    assert parse(instructions="", language=None) == parse()


def test_how_to_speak_is_read_as_far_as_the_model_heeds_it() -> None:
    body = json.dumps({"model": "m", "input": "Hello", "instructions": "Softly.", "language": "Auto"}).encode()
    asked = parse_speech_request(body, models=["m"], voices=[], defaults=ApiDefaults(speaking={"language"}))
    assert (asked.speaking, asked.ignored) == ({"language": "Auto"}, ("instructions",))


def test_the_names_of_other_servers() -> None:
    assert parse(speaker="ethan").voice == "Ethan"
    assert parse(stream=True).stream_format == "audio"
    assert parse(stream=True, stream_format="sse").stream_format == "sse"
    idle = {"stream": False, "sample_rate": 24_000, "speed": 1.0, "task_type": "CustomVoice", "ref_audio": None}
    assert parse(**idle, user="u") == parse()
    assert parse(seed=-(2**63)).seed == -(2**63)


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
