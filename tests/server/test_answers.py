"""Errors, sampling and sound between the pipeline and the API."""

from __future__ import annotations

import base64
import io
import json
import wave
from typing import Any

import av
import numpy as np
import pytest
from av.audio.resampler import AudioResampler

from omni_cluster.config.loader import load_config
from omni_cluster.engine.deadline import DeadlineExceeded
from omni_cluster.engine.output_log import OutputLogFull
from omni_cluster.models.registry import known_families
from omni_cluster.openai_api.chat import AnswerFormat, ChatRequest, check_chat_request, open_chat_request
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.limits import ApiLimits
from omni_cluster.openai_api.video import VideoLimits
from omni_cluster.server.answers import StreamedSound, stage_sampling, whole_sound
from omni_cluster.server.refusals import error_answer
from omni_cluster.types.errors import RequestError, StageDied, StoreFull
from omni_cluster.types.outputs import AudioChunk
from tests.configs import TINY_CONFIG

RATE_HZ = 24_000
LIMITS = ApiLimits(1 << 20, 2, 2, 1, 1 << 20, 10.0, 1 << 20, 1 << 22, 512, VideoLimits(10.0, 16, 1 << 20), 28_000)
CONFIG = load_config(TINY_CONFIG, known_families=known_families())


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return open_chat_request(
        check_chat_request(json.dumps(body).encode(), models=["m"], voices=["a"], limits=LIMITS), {}, LIMITS
    )


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (BadRequest("too large", status=413), 413, "too large"),
        (RequestError("voice is 'x'"), 400, "voice is 'x'"),
        (DeadlineExceeded("took too long"), 504, "took too long"),
        (StageDied("a replica died (RayActorError)"), 503, "send the request again"),
        (StoreFull("no room"), 503, "no room"),
        (OutputLogFull("its hand-over is full"), 500, "its hand-over is full"),
        (ZeroDivisionError("/secret/path"), 500, "its log has the cause"),
    ],
)
def test_each_error_has_its_status_and_a_sentence_that_gives_nothing_away(
    error: Exception, status: int, words: str
) -> None:
    answered, body = error_answer(error)
    assert answered == status
    assert words in body["error"]["message"]
    assert "/secret" not in json.dumps(body)


def test_sampling_goes_to_the_stage_that_makes_the_text() -> None:
    sampling = stage_sampling(chat(temperature=0.5, max_tokens=9, stop=["."]), CONFIG)
    assert sampling == {"thinker": {"temperature": 0.5, "max_tokens": 9, "stop": ["."]}, "talker": {}}


def test_a_seed_goes_to_every_stage_that_samples() -> None:
    assert stage_sampling(chat(seed=5), CONFIG) == {"thinker": {"seed": 5}, "talker": {"seed": 5}}


def test_what_samples_is_the_familys_word_also_without_options() -> None:
    *others, last = CONFIG.stages
    bare = CONFIG.model_copy(update={"stages": [*others, last.model_copy(update={"options": {}})]})
    assert stage_sampling(chat(seed=5), bare) == {"thinker": {"seed": 5}, "talker": {"seed": 5}}


def test_the_text_is_sampled_by_vllm_s_names_too() -> None:
    fields = {
        **{"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [5], "bad_words": ["no"]},
        **{"allowed_token_ids": [1, 2], "logit_bias": {"7": -100}, "skip_special_tokens": False},
        **{"include_stop_str_in_output": True, "spaces_between_special_tokens": False},
    }
    asked = stage_sampling(chat(**fields), CONFIG)
    assert asked == {TEXT: fields | {"logit_bias": {7: -100.0}}, CODEC: {}}


def test_entries_as_vllm_omni_s_clients_send_them() -> None:
    thinker = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_tokens": 64, "seed": 42, "detokenize": True}
    talker = {"temperature": 0.9, "top_k": 40, "detokenize": True, "skip_special_tokens": True}
    code2wav = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 4096, "detokenize": True, "repetition_penalty": 1.1}
    asked = stage_sampling(chat(sampling_params_list=[thinker, talker, code2wav]), CONFIG)
    del thinker["detokenize"]
    assert asked == {TEXT: thinker, CODEC: {"temperature": 0.9, "top_k": 40}}
    by_name = {TEXT: thinker, SOUND: {"seed": 1}}
    assert stage_sampling(chat(stage_sampling=by_name), CONFIG) == {TEXT: thinker, CODEC: {}}


TEXT, CODEC, SOUND = (stage.model_stage for stage in CONFIG.stages)
JSON = {"response_format": {"type": "json_object"}}
CALLED = {"tools": [{"type": "function", "function": {"name": "f"}}]}
NAMED = {"type": "function", "function": {"name": "f"}}


def test_what_no_structure_has_beside_it_is_taken_where_there_is_none() -> None:
    fields = {"min_tokens": 2, "ignore_eos": True, "bad_words": ["a"], "allowed_token_ids": [5]}
    assert stage_sampling(chat(**fields, **CALLED), CONFIG)[TEXT] == fields
    for beside in (CALLED, JSON, {**CALLED, **JSON, "tool_choice": "none"}, {**CALLED, **JSON}):
        assert stage_sampling(chat(stop=["a"], **beside), CONFIG)[TEXT]["stop"] == ["a"]
    assert "stop" not in stage_sampling(chat(stop=[], tool_choice="required", **CALLED), CONFIG)[TEXT]
    codec = {"min_tokens": 2, "ignore_eos": True, "allowed_token_ids": [5]}
    assert stage_sampling(chat(**JSON, stage_sampling_params={CODEC: codec}), CONFIG)[CODEC] == codec


def test_a_stage_s_own_entry_wins_over_the_request_s_fields() -> None:
    entries = [{"temperature": 0.5, "min_tokens": 3}, {"max_tokens": 40, "min_tokens": 40, "seed": 7}, {}]
    request = chat(temperature=1.0, max_tokens=9, ignore_eos=True, seed=5, sampling_params_list=entries)
    assert stage_sampling(request, CONFIG) == {
        TEXT: {"temperature": 0.5, "max_tokens": 9, "min_tokens": 3, "ignore_eos": True, "seed": 5},
        CODEC: {"max_tokens": 40, "min_tokens": 40, "seed": 7},
    }


def test_entries_by_a_stage_s_name_are_those_by_its_place() -> None:
    entries = {CODEC: {"max_tokens": 40, "seed": 7}, TEXT: {"temperature": 0.5}}
    by_name = stage_sampling(chat(seed=5, stage_sampling_params=entries), CONFIG)
    by_place = stage_sampling(chat(seed=5, sampling_params_list=[entries[TEXT], entries[CODEC], None]), CONFIG)
    assert by_name == by_place == {TEXT: {"temperature": 0.5, "seed": 5}, CODEC: {"max_tokens": 40, "seed": 7}}
    assert stage_sampling(chat(stage_sampling_params={CODEC: {"top_k": 3}}), CONFIG) == {TEXT: {}, CODEC: {"top_k": 3}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"sampling_params_list": [{}]}, "sampling_params_list", f"one a stage: {TEXT}, {CODEC}, {SOUND}"),
        ({"sampling_params_list": [None] * 4}, "sampling_params_list", "has 4 entries"),
        ({"sampling_params_list": [None, {"stop": "x"}, None]}, "sampling_params_list[1].stop", "makes no text"),
        (
            {"sampling_params_list": [{"max_tokens": 513}, None, None]},
            "sampling_params_list[0].max_tokens",
            "is 513, but at most 512",
        ),
        (
            {"sampling_params_list": [None, {"max_tokens": 2049}, None]},
            "sampling_params_list[1].max_tokens",
            "is 2049, but at most 2048",
        ),
        (
            {"stage_sampling_params": {"singer": {}}},
            "stage_sampling_params",
            f"the stages are {TEXT}, {CODEC}, {SOUND}",
        ),
        (
            {"stage_sampling_params": {CODEC: {"bad_words": ["x"]}}},
            f"stage_sampling_params.{CODEC}.bad_words",
            "no text",
        ),
        (
            {"stage_sampling_params": {CODEC: {"max_tokens": 2049}}},
            f"stage_sampling_params.{CODEC}.max_tokens",
            "is 2049, but at most 2048",
        ),
        (
            {"stage_sampling_params": {CODEC: {"seed": 1}}, "sampling_params_list": [None, None, None]},
            "stage_sampling_params",
            "send one of them",
        ),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "is 9, but it should be at most its max_tokens, which is 8"),
        ({"min_tokens": 65}, "min_tokens", "at most its max_tokens, which is 64"),  # the configuration's
        (
            {"sampling_params_list": [None, {"min_tokens": 121}, None]},
            "sampling_params_list[1].min_tokens",
            "which is 120",
        ),
        ({**JSON, "min_tokens": 2}, "min_tokens", "is 2, but response_format says what the text is; leave one"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "is true, but guided_regex says"),
        ({**JSON, "bad_words": ["a"]}, "bad_words", 'is ["a"], but response_format says'),
        (
            {**JSON, "stage_sampling_params": {TEXT: {"allowed_token_ids": [5]}}},
            f"stage_sampling_params.{TEXT}.allowed_token_ids",
            "is [5], but response_format says",
        ),
        ({**CALLED, "tool_choice": "required", "bad_words": ["a"]}, "bad_words", "but tool_choice says"),
        ({**CALLED, "tool_choice": "required", "stop": ["a"]}, "stop", 'is ["a"], but tool_choice says'),
        ({**CALLED, **JSON, "tool_choice": NAMED, "stop": "a"}, "stop", "but tool_choice says"),
        (
            {**CALLED, "tool_choice": "required", "stage_sampling_params": {TEXT: {"stop": ["a"]}}},
            f"stage_sampling_params.{TEXT}.stop",
            "but tool_choice says",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}], "ignore_eos": True},
            "ignore_eos",
            "but tools says",
        ),
    ],
)
def test_sampling_that_no_stage_can_take_is_refused(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        stage_sampling(chat(**fields), CONFIG)
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert words in caught.value.message and caught.value.message.endswith(".")


def audio_chunk(start: int, count: int) -> AudioChunk:
    return AudioChunk(start, np.linspace(-0.5, 0.5, count, dtype=np.float32), 24_000)


def test_without_a_format_each_chunk_is_a_wav_file() -> None:
    sound = StreamedSound(None)
    for count in (100, 7):
        with wave.open(io.BytesIO(sound.push(audio_chunk(0, count)))) as file:
            assert (file.getnframes(), file.getframerate()) == (count, 24_000)
    assert sound.flush() == b""


@pytest.mark.parametrize("audio_format", ["pcm16", "wav"])
def test_pieces_of_raw_sound_can_be_joined_in_base64(audio_format: str) -> None:
    sound = StreamedSound(audio_format)
    pieces = [sound.push(audio_chunk(0, 100)), sound.push(audio_chunk(100, 7)), sound.flush()]
    assert all(len(piece) % 6 == 0 for piece in pieces[:-1])
    joined = base64.b64decode("".join(base64.b64encode(p).decode() for p in pieces))
    expected = np.concatenate([audio_chunk(0, 100).samples, audio_chunk(0, 7).samples])
    np.testing.assert_allclose(np.frombuffer(joined, "<i2") / 32768, expected, atol=1 / 32768)


@pytest.mark.parametrize(
    ("audio_format", "correlation"), [("flac", 0.9999), ("mp3", 0.95), ("opus", 0.95), ("aac", 0.95)]
)
def test_pieces_of_a_coded_sound_are_one_file(audio_format: AnswerFormat, correlation: float) -> None:
    spoken = np.sin(np.arange(24_000) * 2 * np.pi * 440 / 24_000, dtype=np.float32) / 2
    sound = StreamedSound(audio_format)
    pieces = [sound.push(AudioChunk(start, spoken[start : start + 5000], 24_000)) for start in range(0, 24_000, 5000)]
    assert sum(map(len, pieces)) > 0, "nothing would be sent before the end"
    pieces.append(sound.flush())
    sound.close()
    assert all(len(piece) % 6 == 0 for piece in pieces[:-1])
    joined = base64.b64decode("".join(base64.b64encode(p).decode() for p in pieces))
    with av.open(io.BytesIO(joined)) as container:
        resampler = AudioResampler(format="flt", layout="mono", rate=24_000)
        frames = [out for frame in container.decode(audio=0) for out in resampler.resample(frame)]
    heard = np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames])
    assert np.correlate(heard, spoken[:12_000]).max() / np.dot(spoken[:12_000], spoken[:12_000]) > correlation


@pytest.mark.parametrize("audio_format", [None, "pcm16", "wav", "flac", "mp3", "opus", "aac"])
def test_a_stream_without_sound_says_nothing(audio_format: AnswerFormat | None) -> None:
    sound = StreamedSound(audio_format)
    assert sound.flush() == b""
    sound.close()


@pytest.mark.parametrize(
    ("audio_format", "mark"),
    [
        ("wav", b"RIFF"),
        ("flac", b"fLaC"),
        ("mp3", b"\xff"),
        ("opus", b"OggS"),
        ("aac", b"\xff\xf1"),
        ("pcm16", b"\x00\xc0"),
    ],
)
def test_a_whole_answer_is_a_file_of_the_format_asked_for(audio_format: AnswerFormat, mark: bytes) -> None:
    assert whole_sound(audio_chunk(0, 2400), audio_format, RATE_HZ).startswith(mark)
    nothing = whole_sound(None, audio_format, RATE_HZ)
    assert len(nothing) < len(whole_sound(audio_chunk(0, 2400), audio_format, RATE_HZ))
    # Raw samples and ADTS have no header that a file without sound could be.
    assert audio_format in ("pcm16", "aac") or nothing.startswith(mark)
