"""Transcripts in every format: nothing is told that is not known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omni_cluster.openai_api.transcript import delta_event, done_event, plain_transcript, transcript
from omni_cluster.openai_api.transcription import TranscriptFormat, TranscriptionRequest
from omni_cluster.types.outputs import OmniRequestOutput, TokenChoice, TokenLogprob

CHOICES = (TokenChoice(TokenLogprob("Hel", -0.5)), TokenChoice(TokenLogprob("lo", -1.5)))
OUTPUT = OmniRequestOutput("r", "Hello", (5, 6, 9), tuple(range(40)), "stop", choices=CHOICES, prompt_audio_tokens=25)


def asked(form: TranscriptFormat = "json", **more: Any) -> TranscriptionRequest:
    made = TranscriptionRequest(
        "omni", np.zeros(0, np.float32), 3725.0625, None, None, "", form, False, False, {"temperature": 0.0}, None
    )
    return replace(made, **more)


def test_json_has_the_text_and_what_it_took() -> None:
    assert transcript(asked(), OUTPUT) == {
        "text": "Hello",
        "usage": {
            "type": "tokens",
            "input_tokens": 40,
            "input_token_details": {"audio_tokens": 25, "text_tokens": 15},
            "output_tokens": 3,
            "total_tokens": 43,
        },
        "finish_reason": "stop",
    }


def test_logprobs_are_told_where_they_were_asked_for() -> None:
    told = transcript(asked(tells_logprobs=True), OUTPUT)["logprobs"]
    assert [(one["token"], one["logprob"]) for one in told] == [("Hel", -0.5), ("lo", -1.5)]
    assert delta_event("Hel", CHOICES[:1], True)["logprobs"] == told[:1]
    assert delta_event("Hel", (), False) == {"type": "transcript.text.delta", "delta": "Hel"}


def test_verbose_json_has_one_segment_as_long_as_the_sound() -> None:
    body = transcript(asked("verbose_json", language="French"), OUTPUT)
    (segment,) = body["segments"]
    assert (body["task"], body["language"], body["duration"]) == ("transcribe", "french", 3725.0625)
    assert body["usage"] == {"type": "duration", "seconds": 3726}
    assert (segment["start"], segment["end"], segment["text"]) == (0.0, 3725.0625, "Hello")
    assert (segment["tokens"], segment["avg_logprob"]) == ([5, 6, 9], -1.0)
    assert all(isinstance(segment[name], float | int) for name in ("seek", "compression_ratio", "no_speech_prob"))


def test_a_language_that_is_not_known_is_not_made_up() -> None:
    assert transcript(asked("verbose_json"), OUTPUT)["language"] == ""
    translated = transcript(asked("verbose_json", into="English", language="French"), OUTPUT)
    assert (translated["task"], translated["language"]) == ("translate", "english")


def test_a_cue_lasts_as_long_as_the_sound() -> None:
    assert plain_transcript(asked("text"), "Hi\n\nyou") == "Hi\n\nyou\n"
    assert plain_transcript(asked("srt"), "Hi\n\nyou") == "1\n00:00:00,000 --> 01:02:05,062\nHi you\n\n"
    vtt = plain_transcript(asked("vtt"), "a --> b & <c>")
    assert vtt == "WEBVTT\n\n00:00:00.000 --> 01:02:05.062\na --&gt; b &amp; &lt;c&gt;\n\n"


@pytest.mark.parametrize("form", ["json", "verbose_json"])
def test_no_words_are_no_segment(form: TranscriptFormat) -> None:
    silent = replace(OUTPUT, text="", choices=(), finish_reason="length")
    body = transcript(asked(form), silent)
    assert (body["text"], body["finish_reason"], body.get("segments", [])) == ("", "length", [])
    assert [plain_transcript(asked(kind), "") for kind in ("srt", "vtt")] == ["", "WEBVTT\n\n"]


def test_the_last_event_has_the_whole_text_and_the_usage() -> None:
    done = done_event(asked(), OUTPUT)
    assert (done["type"], done["text"], done["usage"]["total_tokens"]) == ("transcript.text.done", "Hello", 43)


def test_a_token_of_no_probability_leaves_a_number() -> None:
    never = replace(OUTPUT, choices=(TokenChoice(TokenLogprob("x", -math.inf)),))
    assert math.isfinite(transcript(asked("verbose_json"), never)["segments"][0]["avg_logprob"])
