from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_cluster.openai_api.chat import (
    CheckedChat,
    check_chat_request,
    open_chat_request,
)
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.limits import ApiDefaults
from omni_cluster.types.tool_use import ToolUse
from tests.openai_api.films import video_file
from tests.openai_api.parts import HELLO, LIMITS, audio_part, image_part, parse, png_of, wav_of, with_fields
from tests.openai_api.sounds import recorded


def with_part(part: Any, role: str = "user") -> dict[str, Any]:
    return with_fields(messages=[{"role": "system", "content": "s"}, {"role": role, "content": [part]}])


def video_url_part(url: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}, **fields}


def frames_part(*frames: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "video", "video": list(frames), **fields}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", **function}}


def calling(**function: Any) -> list[dict[str, Any]]:
    """Messages of which the last calls a tool."""
    call = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": "{}", **function}}
    return [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]


def audio_url_part(url: Any) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


PART = "messages[1].content[0]"
LONG = wav_of(np.zeros(16_001))
SHORT = wav_of(np.zeros(320))

BAD = [
    (b"", None, "not valid JSON"),
    (b"{", None, "not valid JSON"),
    (b"\xff\xfe", None, "not valid JSON"),
    (b"[" * 100_000, None, "is nested deeper than 200 levels"),
    (b'{"model": "\\ud800"}', None, "not valid JSON"),
    (b"[]", None, "The request body is [], but it should be an object"),
    ({}, "messages", "messages is required"),
    ({"model": "omni"}, "messages", "messages is required"),
    (with_fields(model=5), "model", "model is 5, but it should be a valid string"),
    (with_fields(model="gpt"), "model", 'The model "gpt" does not exist; use one of omni'),
    (with_fields(messages=[]), "messages", "messages is [], but it should not be empty"),
    (with_fields(messages="hi"), "messages", 'messages is "hi", but it should be a valid array'),
    (with_fields(messages=["hi"]), "messages[0]", 'messages[0] is "hi", but it should be an object'),
    (with_fields(messages=[{"content": "x"}]), "messages[0].role", "messages[0].role is required"),
    (
        with_fields(messages=[{"role": "robot", "content": "x"}]),
        "messages[0].role",
        "messages[0].role is \"robot\", but it should be 'system', 'developer', 'user', 'assistant' or 'tool'",
    ),
    (with_fields(messages=[{"role": "user"}]), "messages[0].content", "messages[0].content is required"),
    (with_fields(messages=[{"role": "user", "content": None}]), "messages[0].content", "is required"),
    (
        with_fields(messages=[{"role": "user", "content": 5}]),
        "messages[0].content",
        "is 5, but it should be a string or",
    ),
    (
        with_fields(messages=[{"role": "user", "content": "x", "tool_calls": calling()[1]["tool_calls"]}]),
        "messages[0].tool_calls",
        "only the assistant calls tools",
    ),
    (
        with_fields(messages=calling(arguments={})),
        "messages[1].tool_calls[0].function.arguments",
        "should be a valid string",
    ),
    (with_fields(messages=[{"role": "user", "content": []}]), "messages[0].content", "should not be empty"),
    (
        with_fields(messages=[*HELLO, {"role": "assistant", "content": None, "audio": {"id": "audio-1"}}]),
        "messages[1].audio",
        'names the answer "audio-1", but no answer is kept here; send its text as content',
    ),
    (with_part("hi"), f"{PART}.type", "'input_audio', 'audio_url', 'video_url', 'video' or 'file'"),
    (with_part({}), f"{PART}.type", "is null, but it should be 'text'"),
    (with_part({"type": 5}), f"{PART}.type", "is 5, but it should be 'text'"),
    (with_part({"type": "smell"}), f"{PART}.type", "is \"smell\", but it should be 'text'"),
    (with_part({"type": "video_url"}), f"{PART}.video_url", "is required"),
    (with_part(video_url_part("file:///etc/passwd")), f"{PART}.video_url.url", "should be an http(s) URL or 'data:"),
    (
        with_part(video_url_part("data:video/mp4;base64,AAAA")),
        f"{PART}.video_url.url",
        "is no mp4, mov, webm or matroska file",
    ),
    (with_part(video_url_part("x", fps=0)), f"{PART}.fps", "should be greater than 0"),
    (with_part(video_url_part("x", fps=61)), f"{PART}.fps", "should be less than or equal to 60"),
    (
        with_part({"type": "video_url", "video_url": {"url": "data:,", "num_frames": 0.5}}),
        f"{PART}.video_url.num_frames",
        "should be a valid integer",
    ),
    (
        with_part({"type": "video_url", "video_url": {"url": "data:,", "num_frames": 8}, "fps": 1}),
        f"{PART}.fps",
        f"{PART}.video_url.num_frames are both given; send one of them",
    ),
    (with_part(video_url_part("https://example.com/a.mp4"), role="system"), PART, "only user messages may hold media"),
    (with_part(frames_part()), f"{PART}.video", "should not be empty"),
    (with_part(frames_part(5)), f"{PART}.video[0]", "should be a valid string"),
    (with_part(frames_part("AAAA")), f"{PART}.video[0]", "should be an http(s) URL or 'data:"),
    (with_part(frames_part(*["https://example.com/1.png"] * 5)), f"{PART}.video", "has 5 frames, but at most 4"),
    (
        with_part(frames_part(png_of("red"), png_of("blue", (4, 5)))),
        f"{PART}.video",
        "size",
    ),
    (
        with_part(frames_part(png_of("red"))) | {"use_audio_in_video": True},
        f"{PART}.video",
        "a list of pictures, which has no sound; leave use_audio_in_video out",
    ),
    (
        with_fields(use_audio_in_video=True, mm_processor_kwargs={"use_audio_in_video": False}),
        "use_audio_in_video",
        "differ; send one of them",
    ),
    (
        with_fields(mm_processor_kwargs={"fps": 5}),
        "mm_processor_kwargs.fps",
        "is 5, which is not supported; leave it out, or use use_audio_in_video",
    ),
    (with_part({"type": "text"}), f"{PART}.text", f"{PART}.text is required"),
    (with_part({"type": "text", "text": 5}), f"{PART}.text", "is 5, but it should be a valid string"),
    (with_part({"type": "image_url"}), f"{PART}.image_url", "is required"),
    (with_part({"type": "image_url", "image_url": "x"}), f"{PART}.image_url", "should be an object"),
    (with_part(image_part("/etc/passwd")), f"{PART}.image_url.url", "should be an http(s) URL or 'data:"),
    (with_part(image_part("file:///etc/passwd")), f"{PART}.image_url.url", "should be an http(s) URL or 'data:"),
    (with_part(audio_url_part("file:///etc/passwd")), f"{PART}.audio_url.url", "should be an http(s) URL or 'data:"),
    (
        with_part(audio_url_part("data:audio/wav;base64,AAAA")),
        f"{PART}.audio_url.url",
        "is no wav, mp3, flac, ogg, webm, m4a, aac or amr file",
    ),
    (with_part({"type": "audio_url", "audio_url": "x"}), f"{PART}.audio_url", "should be an object"),
    (with_part(audio_url_part("https://example.com/a.wav"), role="system"), PART, "only user messages may hold media"),
    (with_part(image_part("data:image/png,abc")), f"{PART}.image_url.url", "data URL without base64"),
    (with_part(image_part("data:image/png;base64,AAAA")), f"{PART}.image_url.url", "not a readable image"),
    (with_part(image_part(png_of("red", (21, 20)))), f"{PART}.image_url.url", "more pixels than the 400"),
    (with_part(image_part(png_of("red")), role="assistant"), PART, "only user messages may hold media"),
    (with_part(audio_part("")), f"{PART}.input_audio.data", "should not be empty"),
    (with_part(audio_part(5)), f"{PART}.input_audio.data", "should be a valid string"),
    (
        with_part(audio_part("AAAA", "wma")),
        f"{PART}.input_audio.format",
        "should be 'wav', 'mp3', 'flac', 'ogg', 'opus', 'webm', 'm4a', 'mp4', 'aac' or 'amr'",
    ),
    (with_part(image_part(png_of("red", (201, 1)))), f"{PART}.image_url.url", "has 201 x 1 pixels, but a side may be"),
    (with_part(frames_part(png_of("red", (201, 1)))), f"{PART}.video[0]", "has 201 x 1 pixels, but a side may be"),
    (with_part(frames_part(png_of("red", (9, 1)))), f"{PART}.video", "has frames of 9 x 1 pixels, but at least 4"),
    (with_part(audio_part(SHORT)), f"{PART}.input_audio.data", "has 20 ms of sound, but at least 20.0625 ms"),
    (
        with_part({"type": "input_audio", "input_audio": {"data": "AAAA"}}),
        f"{PART}.input_audio.format",
        "is required",
    ),
    (with_part(audio_part("AAAAA")), f"{PART}.input_audio.data", "not valid base64"),
    (with_part(audio_part("AAAA")), f"{PART}.input_audio.data", "cannot be read as a wav file"),
    (with_part(audio_part("A" * 80_000)), f"{PART}.input_audio.data", "has 60000 bytes, but at most 50000"),
    (with_part(audio_part(LONG)), f"{PART}.input_audio.data", "lasts longer than 1 s"),
    (with_fields(modalities=["video"]), "modalities[0]", "should be 'text', 'audio' or 'image'"),
    (with_fields(audio={"voice": "alloy"}), "audio.voice", 'is "alloy", but the voices are Chelsie, Ethan'),
    (with_fields(audio={"voice": {"id": "x"}}), "audio.voice", 'is "x", but the voices are Chelsie, Ethan'),
    (with_fields(audio={"voice": 5}), "audio.voice", "is 5, but it should be a name or {'id': <name>}"),
    (with_fields(audio={"voice": {"name": "x"}}), "audio.voice.name", "not supported; leave it out, or use id"),
    (
        with_fields(stage_sampling_params={"talker": {"heat": 1}}),
        "stage_sampling_params.talker.heat",
        "talker.heat is 1, which is not supported; leave it out",
    ),
    (with_fields(stage_sampling_params=[1]), "stage_sampling_params", "should be an object"),
    (with_fields(audio={"format": "ogg"}), "audio.format", "should be 'wav', 'pcm16', 'flac', 'mp3', 'opus' or 'aac'"),
    (with_fields(audio="Chelsie"), "audio", "should be an object"),
    (with_fields(stream="yes"), "stream", 'stream is "yes", but it should be a valid boolean'),
    (with_fields(stream_options={"include_usage": True}), "stream_options", "only for streams"),
    (with_fields(temperature=2.5), "temperature", "temperature is 2.5, but it should be less than or equal to 2"),
    (with_fields(temperature="1"), "temperature", "should be a valid number"),
    (with_fields(temperature=float("nan")), "temperature", "should be a finite number"),
    (with_fields(top_p=-0.1), "top_p", "should be greater than or equal to 0"),
    (with_fields(top_p=1.1), "top_p", "should be less than or equal to 1"),
    (with_fields(frequency_penalty=-3), "frequency_penalty", "should be greater than or equal to -2"),
    (with_fields(presence_penalty=3), "presence_penalty", "should be less than or equal to 2"),
    (with_fields(max_tokens=0), "max_tokens", "should be greater than or equal to 1"),
    (with_fields(max_tokens=257), "max_tokens", "max_tokens is 257, but at most 256 are accepted"),
    (with_fields(max_completion_tokens=257), "max_completion_tokens", "is 257, but at most 256 are accepted"),
    (with_fields(seed=1.5), "seed", "should be a valid integer"),
    (with_fields(seed=2**63), "seed", "should be less than or equal to 9223372036854775807"),
    (with_fields(n=5), "n", "n is 5, but at most 4 are accepted"),
    (with_fields(stop=5), "stop", "should be a string or a list of strings"),
    (with_fields(stop=["a", ""]), "stop[1]", "should not be empty"),
    (with_fields(stop=list("abcde")), "stop", "should have at most 4 strings"),
    (with_fields(min_tokens=-1), "min_tokens", "should be greater than or equal to 0"),
    (with_fields(min_tokens="1"), "min_tokens", "should be a valid integer"),
    (with_fields(ignore_eos=1), "ignore_eos", "should be a valid boolean"),
    (with_fields(sampling_params_list={"a": 1}), "sampling_params_list", "should be a valid array"),
    (with_fields(sampling_params_list=[None, 5]), "sampling_params_list[1]", "is 5, but it should be an object"),
    (
        with_fields(sampling_params_list=[{"logprobs": 5}]),
        "sampling_params_list[0].logprobs",
        "[0].logprobs is 5, which is not supported; leave it out",
    ),
    *[
        (with_fields(sampling_params_list=[None, {name: value}]), f"sampling_params_list[1].{name}", words)
        for name, value, words in [
            ("temperature", 3, "should be less than or equal to 2"),
            ("temperature", True, "should be a valid number"),
            ("top_p", -1, "should be greater than or equal to 0"),
            ("top_k", -2, "should be greater than or equal to -1"),
            ("top_k", 2**31, "should be less than or equal to 2147483647"),
            ("min_p", 1.1, "should be less than or equal to 1"),
            ("repetition_penalty", 0, "should be greater than or equal to 0.01"),
            ("repetition_penalty", 1e-300, "should be greater than or equal to 0.01"),
            ("stop_token_ids", [1] * 65, "but it should have at most 64 entries."),
            ("stop", "x" * 257, "should have at most 256 characters"),
            ("presence_penalty", 3, "should be less than or equal to 2"),
            ("frequency_penalty", "x", "should be a valid number"),
            ("max_tokens", 0, "should be greater than or equal to 1"),
            ("min_tokens", -1, "should be greater than or equal to 0"),
            ("ignore_eos", "yes", "should be a valid boolean"),
            ("seed", 2**63, "should be less than or equal to 9223372036854775807"),
            ("stop", 5, "should be a string or a list of strings"),
            ("stop_token_ids", 5, "should be a valid array"),
        ]
    ],
    (
        with_fields(sampling_params_list=[{"stop_token_ids": [1, -1]}]),
        "sampling_params_list[0].stop_token_ids[1]",
        "should be greater than or equal to 0",
    ),
    (with_fields(tools=[{"type": "function"}]), "tools[0].function", "is required"),
    (with_fields(tools=[tool(name="")]), "tools[0].function.name", "should have at least 1 character"),
    (with_fields(tools=[tool(parameters=[1])]), "tools[0].function.parameters", "should be"),
    *(
        (
            with_fields(tools=[tool(), tool(parameters={"type": kind})], tool_choice=choice),
            "tools[1].function.parameters.type",
            f"tools[1].function.parameters.type is {json.dumps(kind)}, but it should be 'object'.",
        )
        for kind, choice in [("string", "auto"), ("array", "none"), (["object", "null"], "required"), (None, None)]
    ),
    *(
        (
            with_fields(tools=[tool(parameters=parameters)]),
            f"tools[0].function.parameters.{path}",
            f"tools[0].function.parameters.{path} is 5, but it should be an object.",
        )
        for parameters, path in [
            ({"const": 5}, "const"),
            ({"enum": [{}, 5]}, "enum[1]"),
            ({"anyOf": [{"type": "object"}, {"oneOf": [{"const": 5}]}]}, "anyOf[1].oneOf[0].const"),
        ]
    ),
    (with_fields(tools=[{"type": "retrieval"}]), "tools[0].type", "should be 'function'"),
    (with_fields(tools=[tool(name='a"b')]), "tools[0].function.name", "should match pattern"),
    (with_fields(tool_choice="required"), "tool_choice", "asks for a call, but no tools are given; send tools"),
    (with_fields(tool_choice="any"), "tool_choice", "should be 'none', 'auto' or 'required'"),
    (with_fields(tool_choice=5), "tool_choice", "should be 'none', 'auto', 'required' or {'type': 'function'"),
    (with_fields(tool_choice={"type": "function"}), "tool_choice.function", "is required"),
    (
        with_fields(tools=[tool()], tool_choice={"type": "function", "function": {"name": "no"}}),
        "tool_choice.function.name",
        'is "no", but the tools are weather',
    ),
    (
        with_fields(tools=[tool(parameters={"enum": [{"x": "x" * 66_000}]})], tool_choice="required"),
        "tools",
        "characters as JSON, which is the most",
    ),
    (
        with_fields(tools=[tool(strict=True, parameters={"pattern": "(a{999}){999}"})]),
        "tools[0].function.parameters.pattern",
        "with its repetitions written out",
    ),
    (with_fields(tools=[tool()], parallel_tool_calls="no"), "parallel_tool_calls", "should be a valid boolean"),
    (with_fields(functions=[{}]), "functions", "functions is [{}], which is not supported; use tools"),
    (with_fields(logprobs=5), "logprobs", "should be a valid boolean"),
    (with_fields(top_logprobs=5), "top_logprobs", "top_logprobs is 5, but logprobs is not true"),
    (with_fields(logprobs=True, top_logprobs=21), "top_logprobs", "should be less than or equal to 20"),
    (with_fields(logprobs=True, top_logprobs=-1), "top_logprobs", "should be greater than or equal to 0"),
    (with_fields(logit_bias={"one": 5}), "logit_bias", "should have token ids as keys, for example {'50256': -100}"),
    (with_fields(logit_bias={"1": 101}), "logit_bias.1", "should be less than or equal to 100"),
    (with_fields(logit_bias=[1]), "logit_bias", "should be an object"),
    (
        with_fields(chat_template="{{x}}"),
        "chat_template",
        "which is not supported; the checkpoint's own one is used; leave it out",
    ),
    (with_fields(response_format={"type": "xml"}), "response_format.type", "should be 'text', 'json_object' or"),
]
STATUS = {
    "is no wav, mp3, flac": 415,
    "does not exist": 404,
    "but at most 50000": 413,
    "lasts longer": 413,
    "more pixels": 413,
    "readable image": 415,
    "is no mp4": 415,
    "has 5 frames": 413,
}


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}])
def test_a_request_that_names_no_model_means_the_only_one(named: dict[str, Any]) -> None:
    assert parse({**{key: value for key, value in with_fields().items() if key != "model"}, **named}).model == "omni"


@pytest.mark.parametrize(("body", "param", "words"), BAD)
def test_a_bad_request_is_told_in_one_sentence(body: Any, param: str | None, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(body)
    error = caught.value
    assert error.param == param
    assert words in error.message
    assert error.message.endswith(".") and "\n" not in error.message and "pydantic" not in error.message
    assert error.code
    assert error.status == next((status for text, status in STATUS.items() if text in words), 400)


def test_a_body_above_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(BadRequest, match="has 200001 bytes, but at most 200000") as caught:
        parse(b"{" * 200_001)
    assert caught.value.status == 413


def test_a_long_value_is_cut_in_the_sentence() -> None:
    with pytest.raises(BadRequest) as caught:
        parse(with_fields(stream="y" * 10_000))
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("part", "name"), [(audio_part(wav_of([1] * 400)), "audio inputs"), (image_part(png_of("red")), "images")]
)
def test_media_are_counted_over_the_whole_request(part: dict[str, Any], name: str) -> None:
    messages = [{"role": "user", "content": [part]}] * 2
    parse(with_fields(messages=messages))
    with pytest.raises(BadRequest, match=f"more than 2 {name}") as caught:
        parse(with_fields(messages=[*messages, messages[0]]))
    assert str(caught.value.param).startswith("messages[2].content[0].")
    assert caught.value.status == 413


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just(10**4000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [
    *("model", "messages", "modalities", "audio", "stream", "stream_options", "temperature", "top_p", "max_tokens"),
    *("seed", "stop", "n", "response_format", "structured_outputs", "guided_json", "tools", "logprobs", "user"),
    *("min_tokens", "ignore_eos", "sampling_params_list"),
    *("tool_choice", "top_logprobs", "use_audio_in_video", "mm_processor_kwargs"),
]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=3), json_values)
def test_no_json_brings_anything_but_a_refusal(fields: dict[str, Any], part: Any) -> None:
    for body in (with_fields(**fields), with_part(part) | fields, part):
        try:
            parse(json.dumps(body).encode())
        except BadRequest as error:
            assert "\n" not in error.message


def test_the_smallest_request() -> None:
    request = parse(with_fields())
    assert request.messages == ({"role": "user", "content": [{"type": "text", "text": "hello"}]},)
    assert (request.model, request.audios, request.images, request.seed) == ("omni", (), (), None)
    assert not (request.wants_audio or request.stream or request.include_usage)
    assert (request.voice, request.audio_format) == (None, None)
    assert request.sampling == {}


def test_a_full_request() -> None:
    request = parse(
        with_fields(
            modalities=["text", "audio"],
            audio={"voice": "Ethan", "format": "pcm16"},
            stream=True,
            stream_options={"include_usage": True},
            temperature=0,
            top_p=0.9,
            max_completion_tokens=7,
            max_tokens=100_000,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            seed=-3,
            stop=["a", "b"],
            n=1,
        )
    )
    assert request.wants_audio and request.stream and request.include_usage
    assert (request.voice, request.audio_format, request.seed) == ("Ethan", "pcm16", -3)
    assert request.sampling == {
        "temperature": 0.0,
        "top_p": 0.9,
        "max_tokens": 7,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "stop": ["a", "b"],
    }


def test_media_come_decoded_and_in_order() -> None:
    red, blue = image_part(png_of("red")), image_part(png_of("blue"))
    loud, soft = audio_part(wav_of([16384] * 500)), audio_part("data:;base64," + wav_of([-8192] * 400))
    request = parse(
        with_fields(
            messages=[
                {"role": "system", "content": [{"type": "text", "text": "s"}]},
                {"role": "user", "content": [loud, red, {"type": "text", "text": "what?"}]},
                {"role": "assistant", "content": "that", "refusal": None, "tool_calls": []},
                {"role": "user", "content": [blue, soft]},
            ]
        )
    )
    assert request.messages == (
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "user", "content": [{"type": "audio"}, {"type": "image"}, {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "that"}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "audio"}]},
    )
    assert [audio.tolist() for audio in request.audios] == [[0.5] * 500, [-0.25] * 400]
    assert [image[0, 0].tolist() for image in request.images] == [[255, 0, 0], [0, 0, 255]]


@pytest.mark.parametrize("label", ["wav", "mp3", "webm", "m4a", "aac", "opus"])
@pytest.mark.parametrize("name", ["ogg", "m4a", "amr", "aac"])
def test_sound_is_read_as_what_it_is_whatever_its_label_says(name: str, label: str) -> None:
    tone = np.sin(np.arange(24_000, dtype=np.float32) / 9) / 2
    data = base64.b64encode(recorded(name, tone, 48_000)).decode()
    (labelled,) = parse(with_part(audio_part(data, label))).audios
    (by_url,) = parse(with_part(audio_url_part(f"data:audio/{label};base64,{data}"))).audios
    assert np.array_equal(labelled, by_url) and abs(labelled.size - 8_000) < 1_000


@pytest.mark.parametrize(
    ("fields", "wants_audio"),
    [
        ({"audio": {"voice": "Ethan"}}, True),
        ({"audio": {}}, True),
        ({"audio": {"voice": {"id": "Ethan"}}}, True),
        ({"modalities": ["text", "audio"]}, True),
        ({"modalities": ["text"], "audio": {"voice": "Ethan"}}, False),
        ({"modalities": None, "audio": None}, False),
    ],
)
def test_when_audio_is_wanted(fields: dict[str, Any], wants_audio: bool) -> None:
    assert parse(with_fields(**fields)).wants_audio is wants_audio


def test_when_pictures_are_wanted() -> None:
    wants = [parse(with_fields(modalities=asked)).wants_images for asked in (["text", "image"], ["image"], ["text"])]
    assert wants == [True, True, False] and not parse(with_fields()).wants_images


def test_what_means_nothing_here_is_ignored() -> None:
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "made_up": []}
    neutral = {"tools": [], "tool_choice": "none", "logprobs": False, "logit_bias": {}, "functions": None}
    unset = {"stop": None, "n": None, "stream": None, "stream_options": None, "response_format": {"type": "text"}}
    assert parse(with_fields(**ignored, **neutral, **unset)).sampling == {}


def test_fixed_lengths_as_vllm_s_clients_ask_for_them() -> None:
    fields = {"min_tokens": 7, "max_tokens": 7, "ignore_eos": True}
    assert parse(with_fields(**fields)).sampling == fields


def test_the_sampling_of_each_stage() -> None:
    stages = [
        {"temperature": 0, "top_k": -1, "min_tokens": 3, "max_tokens": None, "stop": ["a"]},
        None,
        {},
        {"ignore_eos": False, "stop_token_ids": [1, 2], "seed": -2, "repetition_penalty": 1.1},
    ]
    given = [stage and stage.given() for stage in parse(with_fields(sampling_params_list=stages)).stage_sampling]
    assert given == [{"temperature": 0.0, "top_k": -1, "min_tokens": 3, "stop": ["a"]}, None, {}, stages[3]]
    assert parse(with_fields()).stage_sampling == parse(with_fields(sampling_params_list=None)).stage_sampling == ()


def test_one_stop_string_is_no_list() -> None:
    assert parse(with_fields(stop="END")).sampling == {"stop": "END"}


def test_the_frames_of_a_video_are_chosen_and_come_in_order() -> None:
    data = "data:video/mp4;base64," + base64.b64encode(video_file(frames=45, size=(20, 20), codec="libx264")).decode()
    frames = frames_part(png_of("red"), png_of("blue"), png_of("red"), fps=1.5)
    request = parse(with_part(video_url_part(data)))
    (video,) = request.videos
    assert request.messages[1]["content"] == [{"type": "video"}]
    assert video.frames.shape == (4, 20, 20, 3) and video.audio is None
    (video,) = parse(with_part({"type": "video_url", "video_url": {"url": data, "num_frames": 2}})).videos
    assert video.frames.shape == (2, 20, 20, 3)
    (video,) = parse(with_part(frames)).videos
    assert (video.frames[:, 0, 0, 0].tolist(), video.fps) == ([255, 0, 255, 255], 1.5)


@pytest.mark.parametrize(
    "asking", [{"use_audio_in_video": True}, {"mm_processor_kwargs": {"use_audio_in_video": True}}]
)
def test_the_sound_of_a_video_is_heard_when_asked_for(asking: dict[str, Any]) -> None:
    silent, sounding = (video_file(frames=30, size=(20, 20), sound=sound) for sound in (None, "aac"))
    url = "data:video/mp4;base64," + base64.b64encode(sounding).decode()
    roomy = replace(LIMITS, max_audio_s=2.0)
    (video,) = parse(with_part(video_url_part(url)) | asking, roomy).videos
    assert video.audio is not None and abs(len(video.audio) - 16_000) < 1_600 and video.audio.std() > 0.1
    with pytest.raises(BadRequest, match="sound") as caught:
        parse(with_part(video_url_part("data:video/mp4;base64," + base64.b64encode(silent).decode())) | asking, roomy)
    assert caught.value.code == "no_sound_track"


def test_all_frames_that_have_a_url_are_fetched() -> None:
    urls = [f"https://example.com/{i}.png" for i in range(3)]
    found = checked([frames_part(urls[0], png_of("red"), *urls[1:])])
    params = [f"messages[0].content[0].video[{i}]" for i in (0, 2, 3)]
    assert [(each.param, each.url) for each in found.urls] == list(zip(params, urls, strict=True))
    fetched = {param: base64.b64decode(png_of("blue").split(",")[1]) for param in params}
    (video,) = open_chat_request(found, fetched, LIMITS).videos
    assert video.frames[:, 0, 0, 2].tolist() == [255, 0, 255, 255]


def test_tools_and_calls_of_them_go_to_the_template() -> None:
    tools = [tool(description="Of a place.", parameters={"type": "object"})]
    answered = [*calling(arguments='{"place": "Oslo"}'), {"role": "tool", "tool_call_id": "call-1", "content": "Rain."}]
    request = parse(with_fields(messages=answered, tools=tools))
    assert request.tools == tuple(tools)
    assert [message["content"] for message in request.messages[1:]] == [[], [{"type": "text", "text": "Rain."}]]
    (call,) = request.messages[1]["tool_calls"]
    assert (call["id"], call["function"]) == ("call-1", {"name": "weather", "arguments": {"place": "Oslo"}})
    assert request.messages[2]["tool_call_id"] == "call-1"
    assert parse(with_fields(tools=tools, tool_choice="none")).tools == ()


TOOLS = [tool(), tool(name="time", parameters={"type": "object", "uniqueItems": True})]
NAMED = {"type": "function", "function": {"name": "time"}}


@pytest.mark.parametrize(
    ("fields", "use"),
    [
        ({}, None),
        ({"tools": []}, None),
        ({"tools": TOOLS, "tool_choice": "none"}, None),
        ({"tools": TOOLS}, ToolUse(tuple(TOOLS))),
        ({"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True}, ToolUse(tuple(TOOLS))),
        ({"tools": TOOLS, "parallel_tool_calls": False}, ToolUse(tuple(TOOLS), is_parallel=False)),
        ({"tools": TOOLS, "tool_choice": "required"}, ToolUse(tuple(TOOLS), must_call=True)),
        ({"tools": TOOLS, "tool_choice": NAMED}, ToolUse(tuple(TOOLS), must_call=True, name="time")),
    ],
)
def test_what_an_answer_may_call(fields: dict[str, Any], use: ToolUse | None) -> None:
    assert parse(with_fields(**fields)).tool_use == use


@pytest.mark.parametrize(
    ("asking", "most"), [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"top_logprobs": 20}, 20)]
)
def test_how_many_logprobs_are_asked_for(asking: dict[str, Any], most: int | None) -> None:
    fields = asking | {"logprobs": True} if most else asking
    assert parse(with_fields(**fields)).sampling.get("logprobs") == most


def checked(content: list[Any], **fields: Any) -> CheckedChat:
    body = with_fields(messages=[{"role": "user", "content": content}], **fields)
    raw = json.dumps(body).encode()
    return check_chat_request(raw, models=["omni"], voices=["Chelsie", "Ethan"], limits=LIMITS)


def test_media_by_url_are_named_to_be_fetched_and_then_decoded_in_their_places() -> None:
    sound, picture = np.linspace(-0.5, 0.5, 800), png_of("red")
    content = [
        image_part("HTTPS://example.com/a.png"),
        image_part(png_of("blue")),
        audio_url_part("http://example.com/a.wav"),
        audio_part("https://example.com/b.wav"),
    ]
    found = checked(content)
    assert [(each.param, each.url) for each in found.urls] == [
        ("messages[0].content[0].image_url.url", "HTTPS://example.com/a.png"),
        ("messages[0].content[2].audio_url.url", "http://example.com/a.wav"),
        ("messages[0].content[3].input_audio.data", "https://example.com/b.wav"),
    ]
    png = base64.b64decode(picture.partition(",")[2])
    wav, silence = (base64.b64decode(wav_of(samples)) for samples in (sound, np.zeros(400)))
    fetched = dict(zip((each.param for each in found.urls), (png, wav, silence), strict=True))
    request = open_chat_request(found, fetched, LIMITS)
    assert [image[0, 0].tolist() for image in request.images] == [[255, 0, 0], [0, 0, 255]]
    assert [len(audio) for audio in request.audios] == [800, 400]
    assert [part["type"] for part in request.messages[0]["content"]] == ["image", "image", "audio", "audio"]


def test_what_was_fetched_is_refused_as_what_is_sent() -> None:
    found = checked([image_part("https://example.com/a.png")])
    with pytest.raises(BadRequest, match="not a readable image") as caught:
        open_chat_request(found, {found.urls[0].param: b"<html>"}, LIMITS)
    assert caught.value.param == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    "part",
    [image_part("https://example.com/a.png"), audio_url_part("https://example.com/a.wav")],
    ids=["image", "audio"],
)
def test_too_many_urls_are_refused_before_any_is_fetched(part: Any) -> None:
    most = LIMITS.max_image_parts if part["type"] == "image_url" else LIMITS.max_audio_parts
    assert len(checked([part] * most).urls) == most
    with pytest.raises(BadRequest, match=f"more than {most}"):
        checked([part] * (most + 1))


TEXTS = [{"type": "text", "text": "Hi"}]


@pytest.mark.parametrize(
    ("message", "role", "content"),
    [
        ({"role": "developer", "content": "Hi"}, "system", TEXTS),
        ({"role": "system", "content": "Hi", "name": "n", "cache_control": {"type": "ephemeral"}}, "system", TEXTS),
        ({"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, "user", TEXTS),
        ({"role": "assistant", "content": None}, "assistant", []),
        ({"role": "assistant", "content": ""}, "assistant", [{"type": "text", "text": ""}]),
        ({"role": "assistant", "refusal": "Hi"}, "assistant", TEXTS),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "Hi"}]}, "assistant", TEXTS),
        ({"role": "assistant", "content": "Hi", "audio": {"id": "audio-1"}}, "assistant", TEXTS),
        ({"role": "assistant", "content": None, "audio": {"id": "a", "transcript": "Hi"}}, "assistant", TEXTS),
        (
            {
                "role": "assistant",
                "content": "Hi",
                "audio": {"id": "a", "data": "AA", "transcript": "Hi", "voice": "v"},
            },
            "assistant",
            TEXTS,
        ),
    ],
)
def test_messages_as_clients_give_them_back(message: dict[str, Any], role: str, content: list[Any]) -> None:
    request = parse(with_fields(messages=[*HELLO, message]))
    assert request.messages[1] == {"role": role, "content": content}


def test_media_in_the_parts_of_other_packages() -> None:
    sound, picture = f"data:audio/wav;base64,{wav_of([16384] * 400)}", png_of("red")
    video = "data:video/mp4;base64," + base64.b64encode(video_file(frames=45, size=(20, 20), codec="libx264")).decode()
    parts = [
        {"type": "image", "image": picture},
        {"type": "audio", "audio": sound},
        {"type": "input_image", "image_url": picture, "detail": "auto"},
        {"type": "file", "file": {"file_data": sound, "filename": "a.wav"}},
        {"type": "video", "video": video},
    ]
    request = parse(with_fields(messages=[{"role": "user", "content": parts}]))
    assert [part["type"] for part in request.messages[0]["content"]] == ["image", "audio", "image", "audio", "video"]
    assert [audio.tolist() for audio in request.audios] == [[0.5] * 400] * 2
    assert [image[0, 0].tolist() for image in request.images] == [[255, 0, 0]] * 2
    assert request.videos[0].frames.shape == (4, 20, 20, 3)


def test_files_are_counted_and_fetched_by_what_they_hold() -> None:
    part = {"type": "file", "file": {"file_data": png_of("red")}}
    with pytest.raises(BadRequest, match="more than 2 images") as caught:
        parse(with_fields(messages=[{"role": "user", "content": [part] * 3}]))
    assert caught.value.param == "messages[0].content[2].file.file_data"
    found = checked([{"type": "audio", "audio": "https://example.com/a.wav"}])
    assert [each.param for each in found.urls] == ["messages[0].content[0].audio"]


def test_the_newer_ways_to_ask() -> None:
    assert parse(with_fields(modalities=["audio"])).wants_audio
    assert parse(with_fields(n=3)).choices == 3
    spoken = parse(with_fields(speaker="ethan"))
    assert (spoken.wants_audio, spoken.voice) == (True, "Ethan")
    assert parse(with_fields(modalities=["text"], speaker="Ethan")).wants_audio is False
    assert parse(with_fields(top_p=0)).sampling == {"top_p": 0}
    by_name = parse(with_fields(stage_sampling={"talker": {"top_k": 5}, "thinker": None})).named_sampling
    assert {name: entry.given() for name, entry in by_name.items()} == {"talker": {"top_k": 5}}
    with pytest.raises(BadRequest, match="stage_sampling_params and stage_sampling are both given"):
        parse(with_fields(stage_sampling={"a": {"seed": 1}}, stage_sampling_params={"a": {"seed": 1}}))


def test_what_a_chat_gets_that_names_nothing() -> None:
    defaults = ApiDefaults(voice_aliases={"alloy": "Ethan"}, modalities=("text", "audio"))

    def read(**fields: Any) -> CheckedChat:
        body = json.dumps(with_fields(**fields)).encode()
        return check_chat_request(body, models=["omni"], voices=["Chelsie", "Ethan"], limits=LIMITS, defaults=defaults)

    assert "audio" in read().modalities
    assert "audio" not in read(modalities=["text"]).modalities
    assert read(audio={"voice": "Alloy"}).voice == "Ethan"
