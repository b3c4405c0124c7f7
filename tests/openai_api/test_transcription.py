"""Forms with a sound to be written down: what is accepted, and one sentence for what is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.languages import language_name
from omni_cluster.openai_api.limits import ApiLimits
from omni_cluster.openai_api.transcription import Task, TranscriptionRequest, open_transcription
from tests.openai_api.forms import CONTENT_TYPE, RATE_HZ, form, sound
from tests.openai_api.parts import LIMITS

SOUND = sound()
MODEL = ("model", "omni")


def opened(
    *fields: tuple[str, Any], file: bytes | None = SOUND, task: Task = "transcribe", limits: ApiLimits = LIMITS
) -> TranscriptionRequest:
    return open_transcription(form(*fields, file=file), CONTENT_TYPE, task, models=["omni"], limits=limits)


def test_a_form_with_a_model_and_a_file_is_enough() -> None:
    asked = opened(MODEL)
    assert (asked.format, asked.stream, asked.language, asked.into, asked.hint) == ("json", False, None, None, "")
    assert (asked.sampling, asked.seed, asked.tells_logprobs) == ({"temperature": 0.0}, None, False)
    assert (asked.samples.dtype, asked.samples.size, asked.duration_s) == (np.float32, RATE_HZ // 2, 0.5)
    assert not asked.without_sound().samples.size and asked.without_sound().duration_s == 0.5


@pytest.mark.parametrize("kind", ["WAV", "MP3", "FLAC"])
def test_the_file_s_kind_is_what_its_first_bytes_say(kind: str) -> None:
    assert opened(MODEL, file=sound(kind=kind)).duration_s == pytest.approx(0.5, abs=0.1)


def test_all_that_openai_s_clients_send_is_read() -> None:
    asked = opened(
        MODEL,
        *[("language", "en-US"), ("prompt", "Digique"), ("response_format", "json"), ("temperature", "0.5")],
        *[
            ("stream", "true"),
            ("include[]", "logprobs"),
            ("chunking_strategy", "auto"),
            ("user", "me"),
            ("metadata[a]", "b"),
        ],
        *[("seed", "-7"), ("max_completion_tokens", "9"), ("top_p", "0.5")],
    )
    assert (asked.language, asked.hint, asked.stream, asked.tells_logprobs, asked.seed) == (
        "English", "Digique", True, True, -7,
    )  # fmt: skip
    assert asked.sampling == {"temperature": 0.5, "logprobs": 0, "max_tokens": 9, "top_p": 0.5}


def test_what_is_left_empty_was_not_asked_for() -> None:
    names = ("language", "prompt", "response_format", "temperature", "stream", "include[]", "timestamp_granularities[]")
    assert opened(MODEL, *[(name, "") for name in names]).sampling == opened(MODEL).sampling


def test_any_length_and_any_seed_are_asked_for_by_minus_one() -> None:
    asked = opened(MODEL, ("seed", "-1"), ("max_completion_tokens", "-1"))
    assert (asked.sampling, asked.seed) == (opened(MODEL).sampling, None)


def test_what_is_not_wanted_is_as_if_it_were_left_out() -> None:
    unknown = [("vad_filter", "false"), ("hotwords", ""), ("word_timestamps", "False"), ("beam_size", "0")]
    asked, plain = opened(MODEL, *unknown, ("language", "auto")), opened(MODEL)
    assert (asked.language, asked.sampling) == (None, plain.sampling)
    with pytest.raises(BadRequest, match='vad_filter is "true", which is not supported'):
        opened(MODEL, ("vad_filter", "true"))


def test_segments_are_asked_for_by_either_name() -> None:
    for name in ("timestamp_granularities[]", "timestamp_granularities"):
        asked = opened(MODEL, ("response_format", "verbose_json"), (name, "segment"))
        assert asked.format == "verbose_json" and asked.sampling["logprobs"] == 0


def test_a_translation_is_into_english_or_what_is_named() -> None:
    assert opened(MODEL, task="translate").into == "English"
    asked = opened(MODEL, ("to_language", "zh"), ("language", "french"), task="translate")
    assert (asked.into, asked.language) == ("Chinese", "French")


def test_a_form_that_names_no_model_means_the_only_one() -> None:
    assert opened().model == opened(MODEL).model == "omni"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ([("model", "whisper-1")], "model", '"whisper-1" does not exist; use one of omni'),
        ([MODEL, MODEL], "model", "model twice"),
        ([MODEL, ("speaker", "x")], "speaker", 'speaker is "x", which is not supported'),
        ([MODEL, ("known_speaker_names[]", "a")], "known_speaker_names", "speakers are not told apart"),
        ([MODEL, ("to_language", "de")], "to_language", "which is not supported"),
        ([MODEL, ("chunking_strategy[type]", "server_vad")], "chunking_strategy[type]", "which is not supported"),
        ([MODEL, ("chunking_strategy", "vad")], "chunking_strategy", "should be 'auto'"),
        ([MODEL, ("language", "xx")], "language", "ISO 639-1"),
        ([MODEL, ("temperature", "warm")], "temperature", 'is "warm", but it should be a valid number'),
        ([MODEL, ("temperature", "3")], "temperature", "less than or equal to 2"),
        ([MODEL, ("temperature", "nan")], "temperature", "finite"),
        ([MODEL, ("stream", "perhaps")], "stream", "should be a valid boolean"),
        ([MODEL, ("seed", "9" * 5000)], "seed", "but it"),
        ([MODEL, ("response_format", "diarized_json")], "response_format", "'json', 'text', 'srt'"),
        ([MODEL, ("prompt", "x" * 4097)], "prompt", "at most 4096"),
        ([MODEL, ("prompt", b"\xff")], "prompt", "UTF-8"),
        ([MODEL, ("max_completion_tokens", "257")], "max_completion_tokens", "at most 256"),
        ([MODEL, ("include[]", "words")], "include[0]", "logprobs"),
        ([MODEL, ("include[]", "logprobs"), ("response_format", "text")], "include", "only for response_format 'json'"),
        ([MODEL, ("stream", "1"), ("response_format", "srt")], "stream", "'json' or 'text', but that is 'srt'"),
        ([MODEL, ("timestamp_granularities[]", "segment")], "timestamp_granularities", "'verbose_json'"),
        (
            [MODEL, ("response_format", "verbose_json"), ("timestamp_granularities[]", "word")],
            "timestamp_granularities",
            "tells no times of words",
        ),
    ],
)
def test_a_bad_field_is_told_in_one_sentence(fields: list[tuple[str, Any]], param: str, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        opened(*fields)
    assert caught.value.param == param
    assert words in caught.value.message and caught.value.message.endswith(".")
    assert "\n" not in caught.value.message and len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("files", "status", "words"),
    [
        ([], 400, "file is required"),
        ([b""], 400, "file is empty"),
        ([SOUND, SOUND], 400, "file twice"),
        ([b"hello, I am text"], 415, "file is no "),
        ([SOUND[:20]], 400, "file"),
        ([b"RIFF\xff\xff\xff\xffWAVEfmt " + bytes(60)], 400, "file"),
        ([SOUND + bytes(50_001)], 413, "at most 50000 are accepted"),
        ([sound(1.2)], 413, "file lasts longer than 1 s"),
    ],
)
def test_a_bad_file_is_told_in_one_sentence(files: list[bytes], status: int, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        opened(MODEL, *[("file", data) for data in files], file=None)
    assert (caught.value.param, caught.value.status) == ("file", status)
    assert words in caught.value.message and caught.value.message.endswith(".")


def test_a_deployment_that_takes_no_sound_says_so() -> None:
    with pytest.raises(BadRequest, match="at most 0 are accepted"):
        opened(MODEL, limits=replace(LIMITS, max_audio_parts=0))


@pytest.mark.parametrize(
    ("value", "name"),
    [("en", "English"), ("EN", "English"), ("pt_BR", "Portuguese"), ("german", "German"), ("zh-Hans", "Chinese")],
)
def test_a_language_is_known_by_its_code_or_name(value: str, name: str) -> None:
    assert language_name(value, "language") == name
