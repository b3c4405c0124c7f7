"""Every format of sound, whole and streamed; `tests/cluster` has one of them on a cluster."""

from __future__ import annotations

import json

import pytest

from tests.engine.stages import MAX_CODES
from tests.http_app import MODEL, assert_comes_in, events
from tests.server.local import LocalApp


@pytest.mark.parametrize("audio_format", ["flac", "opus", "mp3", "aac"])
@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
def test_sound_comes_in_the_format_asked_for(local: LocalApp, audio_format: str, stream: bool) -> None:
    assert_comes_in(audio_format, local, stream=stream)


@pytest.mark.parametrize("most_codes", [8, 60])
def test_sound_that_breaks_off_at_its_limit_is_told_in_every_form(local: LocalApp, most_codes: int) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "modalities": ["text", "audio"],
        "max_tokens": 4,
        "min_tokens": 4,
        "stage_sampling_params": {"talker": {"max_tokens": most_codes}},
        "stop": ["never said"],
    }
    whole = local.client.post("/v1/chat/completions", json=body).json()
    last = events(local.client.post("/v1/chat/completions", json=body | {"stream": True}))[-1]
    for answer in (whole, last):
        ends = {name: stage["finish_reason"] for name, stage in answer["omni"]["stages"].items()}
        assert ends["talker"] == "length" and ends["code2wav"] == "stop"
        assert answer["choices"][0]["finish_reason"] == "length"


def test_speech_says_how_it_ended(local: LocalApp) -> None:
    body = {"model": MODEL, "input": "Hello world.", "response_format": "pcm", "seed": 1}
    whole = local.client.post("/v1/audio/speech", json=body)
    stream = local.client.post("/v1/audio/speech", json=body | {"stream_format": "sse"}).text.split("data: ")
    last = json.loads(stream[-1])
    assert whole.headers["x-omni-finish-reason"] == last["finish_reason"]
    most_bytes = MAX_CODES * 480 * 2
    assert (last["finish_reason"] == "length") == (len(whole.content) >= most_bytes)
