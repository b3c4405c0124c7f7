"""Requests that are refused, and what their refusals say."""

from __future__ import annotations

import base64
import functools
import io
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from omni_cluster.openai_api.encoding import SoundFormat, encode
from tests.openai_api.forms import CONTENT_TYPE as FORM
from tests.openai_api.forms import form

CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/speech"
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
JSON = "application/json"
MODEL = "preset:tiny"


@dataclass(frozen=True)
class BadInput:
    """A request, and its refusal: HTTP status, `code`, `param`, and a part of its sentence.

    `body`: bytes as they are sent, what is sent as JSON, or a function that makes one of both when it is needed.
    """

    name: str
    body: Any
    status: int
    code: str | None
    param: str | None
    words: str
    path: str = CHAT
    method: str = "POST"
    content_type: str | None = JSON

    def content(self) -> bytes:
        body = self.body() if callable(self.body) else self.body
        return body if isinstance(body, bytes) else json.dumps(body).encode()

    def headers(self) -> Mapping[str, str]:
        return {} if self.content_type is None else {"Content-Type": self.content_type}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}


def user(*parts: Any) -> dict[str, Any]:
    return said("user", list(parts))


def said(role: Any, content: Any, **fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": role, "content": content, **fields}])


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def audio_url(url: Any) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


def audio(data: Any, kind: Any = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": kind}}


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{as_base64(data)}"


@functools.cache
def png(width: int = 8, height: int = 8) -> bytes:
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


@functools.cache
def sound(kind: SoundFormat = "wav", seconds: float = 0.1) -> bytes:
    return encode(np.zeros(int(seconds * 8000), np.float32), 8000, kind)


def float_wav(largest: float, samples: int = 16_000) -> bytes:
    """A sine that is so large, in a file of float32."""
    values = (np.sin(np.arange(1, samples + 1) * np.pi / 2) * largest).astype("<f4").tobytes()
    layout = struct.pack("<HHIIHH", 3, 1, 16_000, 64_000, 4, 32)
    body = b"WAVEfmt " + struct.pack("<I", 16) + layout + b"data" + struct.pack("<I", len(values)) + values
    return b"RIFF" + struct.pack("<I", len(body)) + body


def speech(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "Hi.", **fields}


def refused(
    name: str, body: Any, param: str | None, words: str, *, code: str = "invalid_value", **more: Any
) -> BadInput:
    return BadInput(name, body, more.pop("status", 400), code, param, words, **more)


def missing(name: str, body: Any, param: str, **more: Any) -> BadInput:
    return refused(name, body, param, f"{param} is required", code="missing_required_parameter", **more)


def unsupported(name: str, body: Any, param: str, words: str, **more: Any) -> BadInput:
    return refused(name, body, param, words, code="unsupported_parameter", **more)


def too_much(name: str, body: Any, param: str | None, words: str, code: str, **more: Any) -> BadInput:
    return refused(name, body, param, words, code=code, status=413, **more)


ROUTES = (
    refused("chat by GET", b"", None, "GET is not for \"/v1/chat/completions\"; use POST",
            code="method_not_supported", status=405, method="GET"),
    refused("speech by PUT", speech(), None, "use POST",
            code="method_not_supported", status=405, method="PUT", path=SPEECH),
    refused("models by POST", {}, None, "use GET", code="method_not_supported", status=405, path="/v1/models"),
    refused("another model's page", b"", "model", "The model \"gpt\" does not exist; use one of preset:tiny",
            code="model_not_found", status=404, method="GET", path="/v1/models/gpt"),
    *(refused(path, {}, None, f"\"{path}\" is no path of this API, which has /", code="unknown_url", status=404,
              path=path)
      for path in ("/v1/embeddings", "/v1/moderations", "/v1/images/generations", "/v1/files", "/v1/batches", "/score",
                   "/rerank")),
    refused("plain text", chat(), None, "is 'text/plain', but it should be 'application/json'",
            code="unsupported_content_type", status=415, content_type="text/plain"),
    refused("a form", chat(), None, "'application/x-www-form-urlencoded'",
            code="unsupported_content_type", status=415, content_type="application/x-www-form-urlencoded"),
    refused("no content type", speech(), None, "Content-Type is ''",
            code="unsupported_content_type", status=415, content_type=None, path=SPEECH),
)  # fmt: skip

FORMS = (
    refused("a form, as JSON", {"model": MODEL}, None, "is 'application/json', but it should be 'multipart/form-data'",
            code="unsupported_content_type", status=415, path=TRANSCRIPTIONS),
    missing("a form without a file", form(("model", MODEL)), "file", path=TRANSCRIPTIONS, content_type=FORM),
    refused("a form that is cut off", form(("model", MODEL), file=sound())[:-9], None, "ends before its form does",
            code="invalid_form", path=TRANSCRIPTIONS, content_type=FORM),
    refused("a form of another boundary", form(("model", MODEL), file=sound()), None, "no form with the boundary",
            code="invalid_form", path=TRANSCRIPTIONS, content_type=f"{FORM}x"),
    refused("a form without a boundary", form(("model", MODEL)), None, "names no boundary",
            code="invalid_form", path=TRANSLATIONS, content_type="multipart/form-data"),
    refused("a form with an empty file", form(("model", MODEL), file=b""), "file", "file is empty",
            path=TRANSCRIPTIONS, content_type=FORM),
    refused("a form with times of words", form(("model", MODEL), ("response_format", "verbose_json"),
            ("timestamp_granularities[]", "word"), file=sound()), "timestamp_granularities", "tells no times of words",
            path=TRANSCRIPTIONS, content_type=FORM),
    refused("a form with an unknown field", form(("model", MODEL), ("speaker", "x"), file=sound()), "speaker",
            "which is not supported", code="unsupported_parameter", path=TRANSLATIONS, content_type=FORM),
    too_much("a form with a file that is too large", lambda: form(("model", MODEL), file=bytes(26_214_401)), "file",
             "file has 26214401 bytes", "media_too_large", path=TRANSCRIPTIONS, content_type=FORM),
    too_much("a form that is too large", lambda: form(("model", MODEL), file=bytes(28_000_000)), None,
             "The request body has more than 27262976 bytes", "request_too_large", path=TRANSCRIPTIONS,
             content_type=FORM),
    too_much("a form with a sound that is too long", lambda: form(("model", MODEL), file=sound("flac", 601)), "file",
             "file lasts longer than 600 s", "audio_too_long", path=TRANSCRIPTIONS, content_type=FORM),
)  # fmt: skip

TEXTS = (
    missing("no prompt", {"model": MODEL}, "prompt", path=COMPLETIONS),
    refused("an empty prompt", {"model": MODEL, "prompt": ""}, "prompt", "should not be empty", path=COMPLETIONS),
    refused("a prompt with a mark of sound", {"model": MODEL, "prompt": "<|AUDIO|>"}, "prompt", "stands for media",
            path=COMPLETIONS),
    refused("a prompt of tokens that are none", {"model": MODEL, "prompt": [512]}, "prompt", "model's are 0 to 511",
            path=COMPLETIONS),
    refused("a prompt of too many tokens", {"model": MODEL, "prompt": [7] * 1537}, "prompt", "context length is 1536",
            code="context_length_exceeded", path=COMPLETIONS),
    refused("one prompt of several that is too long", {"model": MODEL, "prompt": ["a", "word " * 900]}, "prompt",
            "maximum context length is 1536 tokens", code="context_length_exceeded", path=COMPLETIONS),
    refused("more min_tokens than max_tokens", {"model": MODEL, "prompt": "a", "min_tokens": 17}, "min_tokens",
            "at most its max_tokens, which is 16", path=COMPLETIONS),
    refused("nothing to tokenize", {"model": MODEL}, "prompt", "prompt or messages", path="/tokenize",
            code="missing_required_parameter"),
    refused("media to tokenize", {"messages": user(image(data_url(png())))["messages"]}, "messages",
            "messages have media", path="/tokenize"),
    refused("a token that is none", {"tokens": [512]}, "tokens[0]", "tokens are 0 to 511", path="/detokenize"),
)  # fmt: skip

BODIES = (
    refused("no body", b"", None, "not valid JSON", code="invalid_json"),
    refused("broken JSON", b'{"model": ', None, "not valid JSON", code="invalid_json"),
    refused("no UTF-8", b'{"model": "\xff"}', None, "not valid JSON in UTF-8", code="invalid_json"),
    refused("half a surrogate", b'{"model": "\\ud800"}', None, "not valid JSON in UTF-8", code="invalid_json"),
    refused("nested too deep", b'{"model": ' + b"[" * 5000, None, "is nested deeper than 200 levels"),
    refused("a list", [chat()], None, "The request body is"),
    refused("a string", "hello", None, "The request body is \"hello\""),
    refused("null", b"null", None, "The request body is null"),
    refused("speech, a list", [speech()], None, "The request body is", path=SPEECH),
    refused("speech, broken JSON", b"{", None, "not valid JSON", code="invalid_json", path=SPEECH),
    too_much("body above its limit", lambda: b" " * (67_108_864 + 1), None, "more than 67108864 bytes",
             "request_too_large"),
    too_much("speech, body above its limit", lambda: b" " * (65_536 + 1), None, "more than 65536 bytes",
             "request_too_large", path=SPEECH),
    missing("no messages", {"model": MODEL}, "messages"),
    refused("another model", chat(model="gpt"), "model", "\"gpt\" does not exist; use one of preset:tiny",
            code="model_not_found", status=404),
    refused("model of another type", chat(model=3), "model", "is 3, but it should be a valid string"),
)  # fmt: skip

MESSAGES = (
    refused("no message", chat(messages=[]), "messages", "is [], but it should not be empty"),
    refused("messages no list", chat(messages="Hi"), "messages", "is \"Hi\", but it should be a valid array"),
    refused("a message no object", chat(messages=["Hi"]), "messages[0]", "is \"Hi\""),
    refused("another role", said("robot", "Hi"), "messages[0].role",
            "is \"robot\", but it should be 'system', 'developer'"),
    missing("no role", chat(messages=[{"content": "Hi"}]), "messages[0].role"),
    missing("no content", chat(messages=[{"role": "user"}]), "messages[0].content"),
    refused("content a number", said("user", 5), "messages[0].content", "is 5, but it should be a string or a list"),
    refused("no part", said("user", []), "messages[0].content", "is [], but it should not be empty"),
    refused("another part", user({"type": "smell"}), "messages[0].content[0].type", "is \"smell\", but it should be"),
    refused("a part without type", user({"text": "Hi"}), "messages[0].content[0].type", "is null, but it should be"),
    refused("a part no object", user("Hi"), "messages[0].content[0].type", "but it should be 'text'"),
    missing("a text part without text", user({"type": "text"}), "messages[0].content[0].text"),
    refused("text a number", user({"type": "text", "text": 5}), "messages[0].content[0].text", "is 5"),
    missing("no URL", user({"type": "image_url", "image_url": {}}), "messages[0].content[0].image_url.url"),
    missing("a sound without format", user({"type": "input_audio", "input_audio": {"data": "AAAA"}}),
            "messages[0].content[0].input_audio.format"),
    refused("audio in the assistant's message", said("assistant", [audio(as_base64(sound()))]),
            "messages[0].content[0]", "is input_audio in a message of the assistant, but only user messages"),
    refused("an image in the system's message", said("system", [image(data_url(png()))]),
            "messages[0].content[0]", "is image_url in a message of the system, but only user messages"),
    refused("an earlier answer by its id", said("assistant", None, audio={"id": "audio-1"}), "messages[0].audio",
            "names the answer \"audio-1\", but no answer is kept here; send its text as content"),
    refused("a user who refuses", said("user", "Hi", refusal="no"), "messages[0].refusal", "only the assistant has it"),
    unsupported("an unknown field of a message", said("user", "Hi", mood="good"), "messages[0].mood",
                "is \"good\", which is not supported; leave it out, or use role, content"),
    unsupported("an unknown field of a part", user({"type": "text", "text": "Hi", "bold": True}),
                "messages[0].content[0].bold", "is true, which is not supported"),
    unsupported("a file by its id", user({"type": "file", "file": {"file_id": "file-1"}}),
                "messages[0].content[0].file.file_id", "no file is kept here; send its data as file_data"),
    refused("a file of no medium", user({"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA"}}),
            "messages[0].content[0].file.file_data", "of a sound, an image or a video"),
)  # fmt: skip

IMAGE_PARAM = "messages[0].content[0].image_url.url"
SOUND_PARAM = "messages[0].content[0].input_audio.data"
SOUND_URL_PARAM = "messages[0].content[0].audio_url.url"

MEDIA = (
    refused("a sound no base64", user(audio("!!!!")), SOUND_PARAM, "is not valid base64", code="invalid_base64"),
    refused("base64 cut off", user(audio("AAAAA")), SOUND_PARAM, "is not valid base64", code="invalid_base64"),
    refused("an empty sound", user(audio("")), SOUND_PARAM, "should not be empty"),
    refused("an image no base64", user(image("data:image/png;base64,***")), IMAGE_PARAM, "is not valid base64",
            code="invalid_base64"),
    refused("a data URL without base64", user(image("data:image/png,AAAA")), IMAGE_PARAM,
            "is a data URL without base64", code="invalid_base64"),
    refused("an empty data URL", user(image("data:image/png;base64,")), IMAGE_PARAM, "is empty", code="invalid_base64"),
    refused("another sound format", user(audio("AAAA", "wma")), "messages[0].content[0].input_audio.format",
            "is \"wma\", but it should be 'wav', 'mp3', 'flac', 'ogg'"),
    *(
        refused(f"no {kind} file", user(audio(as_base64(b"nothing of a file" * 20), kind)), SOUND_PARAM,
                f"{kind} file; send a whole file", code="bad_audio")
        for kind in ("wav", "mp3", "flac", "ogg", "opus", "webm", "m4a", "mp4", "aac", "amr")
    ),
    refused("half of another file than its label says", user(audio(as_base64(sound("flac")[:60]))), SOUND_PARAM,
            "cannot be read as a flac file", code="bad_audio"),
    refused("a sound by URL that has but a mark", user(audio_url(data_url(b"OggS" * 9, "audio/ogg"))), SOUND_URL_PARAM,
            "cannot be read as an ogg file", code="bad_audio"),
    refused("a sound by URL of no format", user(audio_url(data_url(b"MThd" * 9, "audio/midi"))), SOUND_URL_PARAM,
            "is no wav, mp3, flac, ogg, webm, m4a, aac or amr file", code="unsupported_audio", status=415),
    *(
        refused(f"samples as large as {largest}", user(audio(as_base64(float_wav(largest)))), SOUND_PARAM,
                f"has samples as large as {largest:g}, but at most 32768 is accepted", code="bad_audio")
        for largest in (1e6, 1e18, 1e30, 3e38)
    ),
    refused("a sound of one sample", user(audio(as_base64(float_wav(0.5, 1)))), SOUND_PARAM,
            "has 0.0625 ms of sound, but at least 20.0625 ms are needed", code="bad_audio"),
    refused("a picture too narrow", user(image(data_url(png(300, 1)))), IMAGE_PARAM,
            "has 300 x 1 pixels, but a side may be at most 200 times as long as the other", code="bad_image"),
    refused("no image", user(image(data_url(b"nothing of a file"))), IMAGE_PARAM,
            "is not a readable image; send a PNG", code="unsupported_image", status=415),
    refused("half an image", user(image(data_url(png(64, 64)[:50]))), IMAGE_PARAM, "is a damaged PNG image",
            code="bad_image"),
    refused("base64 for a URL", user(image(as_base64(png()))), IMAGE_PARAM, "should be an http(s) URL or 'data:"),
    too_much("17 images", user(*[image(data_url(png()))] * 17), "messages[0].content[16].image_url.url",
             "more than 16 images, which is the most that is accepted", "too_many_media"),
    too_much("65 sounds", user(*[audio(as_base64(sound()))] * 65), "messages[0].content[64].input_audio.data",
             "more than 64 audio inputs, which is the most that is accepted", "too_many_media"),
    too_much("a file above its limit", lambda: user(audio("A" * 34_952_540)), SOUND_PARAM,
             "has 26214405 bytes, but at most 26214400 are accepted", "media_too_large"),
    too_much("a sound above its limit", lambda: user(audio(as_base64(sound("flac", 600.5)), "flac")), SOUND_PARAM,
             "lasts longer than 600 s", "audio_too_long"),
    too_much("an image above its limit", lambda: user(image(data_url(png(20_000, 9_000)))), IMAGE_PARAM,
             "has more pixels than the 178956970", "image_too_large"),
)  # fmt: skip


def video_url(url: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}, **fields}


def frames(*urls: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "video", "video": list(urls), **fields}


VIDEO_PARAM = "messages[0].content[0].video_url.url"
FRAMES_PARAM = "messages[0].content[0].video"


def calling(arguments: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return said("assistant", None, tool_calls=[call])


VIDEOS = (
    missing("a video without a URL", user({"type": "video_url", "video_url": {}}), VIDEO_PARAM),
    refused("a video's path", user(video_url("/etc/passwd")), VIDEO_PARAM, "should be an http(s) URL"),
    refused("no video", user(video_url(data_url(b"nothing of a file", "video/mp4"))), VIDEO_PARAM,
            "is no mp4, mov, webm or matroska file", code="unsupported_video", status=415),
    refused("half a video", user(video_url(data_url(b"\0\0\0\x18ftypisom" + bytes(12), "video/mp4"))), VIDEO_PARAM,
            "cannot be read as a video", code="bad_video"),
    refused("a video at no rate", user(video_url("data:,", fps=0)), "messages[0].content[0].fps",
            "is 0, but it should be greater than 0"),
    refused("no frames", user(frames()), FRAMES_PARAM, "should not be empty"),
    refused("frames too narrow", user(frames(data_url(png(300, 1)))), "messages[0].content[0].video[0]",
            "has 300 x 1 pixels, but a side may be at most 200", code="bad_image"),
    refused("frames too low", user(frames(data_url(png(9, 3)))), FRAMES_PARAM,
            "has frames of 9 x 3 pixels, but at least 4 pixels of height", code="bad_video"),
    refused("frames of two sizes", user(frames(data_url(png(8, 8)), data_url(png(8, 9)))), FRAMES_PARAM, "8",
            code="bad_video"),
    too_much("frames above their limit", user(frames(*[data_url(png())] * 129)), FRAMES_PARAM,
             "has 129 frames, but at most 128 are accepted", "too_many_media"),
    too_much("five videos", user(*[frames(data_url(png()))] * 5), "messages[0].content[4].video[0]",
             "more than 4 videos", "too_many_media"),
    refused("the sound of pictures", user(frames(data_url(png()))) | {"use_audio_in_video": True}, FRAMES_PARAM,
            "a list of pictures, which has no sound"),
    unsupported("an option of the processor", chat(mm_processor_kwargs={"min_pixels": 1}),
                "mm_processor_kwargs.min_pixels", "leave it out, or use use_audio_in_video"),
)  # fmt: skip

TOOLS_AND_LOGPROBS = (
    missing("a tool without a function", chat(tools=[{"type": "function"}]), "tools[0].function"),
    refused("a tool without a name", chat(tools=[{"type": "function", "function": {"name": ""}}]),
            "tools[0].function.name", "should have at least 1 character"),
    refused("a tool of another type", chat(tools=[{"type": "web", "function": {"name": "f"}}]), "tools[0].type",
            "should be 'function'"),
    refused("a forced tool of none", chat(tool_choice="required"), "tool_choice", "but no tools are given"),
    refused("a forced tool that is not there",
            chat(tools=[{"type": "function", "function": {"name": "f"}}],
                 tool_choice={"type": "function", "function": {"name": "g"}}),
            "tool_choice.function.name", "but the tools are f"),
    refused("a tool of a schema that is none",
            chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/no"}}}],
                 tool_choice="required"), "tools", "is invalid, or has"),
    refused("a bias of a token too large", chat(logit_bias={"584": 1}), "logit_bias",
            "has the token 584, but the model's are 0 to 511"),
    refused("a stop token too large", chat(stage_sampling_params={"thinker": {"stop_token_ids": [9, 512]}}),
            "stage_sampling_params.thinker.stop_token_ids", "has the token 512, but the model's are 0 to 511"),
    refused("a code too large", chat(stage_sampling_params={"talker": {"allowed_token_ids": [9, 8448]}}),
            "stage_sampling_params.talker.allowed_token_ids", "has the token 8448, but the model's are 0 to 8447"),
    refused("a bad word of blanks", chat(bad_words=["a", "  "]), "bad_words[1]", "should have more than blanks"),
    refused("bad words beside a structure", chat(bad_words=["a"], guided_choice=["x"]), "bad_words",
            "but guided_choice says what the text is; leave one of them out"),
    refused("bad words beside a structure of a response", {"model": MODEL, "input": "Hi.", "bad_words": ["a"],
            "text": {"format": {"type": "json_object"}}}, "bad_words", "but text.format says what the text is",
            path=RESPONSES),
    refused("an end of a text too large", {"model": MODEL, "prompt": "Hi", "allowed_token_ids": [600]},
            "allowed_token_ids", "has the token 600", path=COMPLETIONS),
    refused("a user who calls a tool", said("user", "Hi", tool_calls=calling("{}")["messages"][0]["tool_calls"]),
            "messages[0].tool_calls", "only the assistant calls tools"),
    refused("logprobs as a number", chat(logprobs=3), "logprobs", "should be a valid boolean"),
    refused("top_logprobs alone", chat(top_logprobs=3), "top_logprobs", "but logprobs is not true"),
    refused("too many top_logprobs", chat(logprobs=True, top_logprobs=21), "top_logprobs",
            "should be less than or equal to 20"),
)  # fmt: skip


def not_fetched(name: str, url: str, words: str, code: str, **more: Any) -> BadInput:
    return refused(name, user(image(url)), IMAGE_PARAM, words, code=code, **more)


URLS = (
    refused("a file's URL", user(image("file:///etc/passwd")), IMAGE_PARAM, "is \"file:///etc/passwd\", but it should"),
    refused("another scheme", user(image("ftp://example.com/a.png")), IMAGE_PARAM, "should be an http(s) URL"),
    refused("a path", user(audio_url("/etc/passwd")), SOUND_URL_PARAM, "should be an http(s) URL"),
    not_fetched("this host", "http://127.0.0.1:8265/", "127.0.0.1, which is not a public host", "url_forbidden"),
    not_fetched("this host, in IPv6", "http://[::1]:8265/", "::1, which is not a public host", "url_forbidden"),
    not_fetched("this host in an IPv6 address", "http://[::ffff:127.0.0.1]/", "not a public host", "url_forbidden"),
    not_fetched("this host by name", "http://localhost/", "localhost, which is not a public host", "url_forbidden"),
    not_fetched("the metadata of a cloud", "http://169.254.169.254/latest", "not a public host", "url_forbidden"),
    not_fetched("a private network", "https://10.0.0.1/a.png", "not a public host", "url_forbidden"),
    not_fetched("an address as a number", "http://2130706433/", "is no http or https URL with a host's name",
                "url_not_supported"),
    not_fetched("an address in hexadecimal", "http://0x7f.1/", "with a host's name", "url_not_supported"),
    not_fetched("a port of another service", "http://example.com:22/", "names another port", "url_not_supported"),
    not_fetched("a user's name", "http://me@example.com/", "has a user name", "url_not_supported"),
    not_fetched("no host", "http:///a.png", "with a host's name", "url_not_supported"),
    refused("a sound by a private URL", user(audio("http://192.168.0.1/a.wav")), SOUND_PARAM, "not a public host",
            code="url_forbidden"),
)  # fmt: skip

OPTIONS = (
    refused("another voice", chat(audio={"voice": "Bob", "format": "wav"}), "audio.voice",
            "is \"Bob\", but the voices are Chelsie, Ethan"),
    refused("another voice's id", chat(audio={"voice": {"id": "Bob"}}), "audio.voice", "but the voices are"),
    refused("another format", chat(audio={"voice": "Ethan", "format": "m4a"}), "audio.format", "is \"m4a\", but it"),
    refused("audio no object", chat(audio="Ethan"), "audio", "is \"Ethan\""),
    refused("another modality", chat(modalities=["text", "video"]), "modalities[1]", "is \"video\", but it should be"),
    refused("pictures where no stage makes any", chat(modalities=["text", "image"]), "modalities",
            "is [\"text\", \"image\"], but no stage here makes pictures, use [\"text\", \"audio\"]"),
    refused("stream a string", chat(stream="yes"), "stream", "is \"yes\", but it should be a valid boolean"),
    refused("stream options without a stream", chat(stream_options={"include_usage": True}), "stream_options",
            "only for streams"),
    refused("five answers", chat(n=5), "n", "is 5, but at most 4 are accepted"),
    refused("no answer", chat(n=0), "n", "is 0, but it should be greater than or equal to 1"),
    refused("n a string", chat(n="1"), "n", "is \"1\", but it should be a valid integer"),
    refused("too hot", chat(temperature=2.5), "temperature", "is 2.5, but it should be less than or equal to 2"),
    refused("temperature NaN", b'{"model": "preset:tiny", "messages": [{"role": "user", "content": "Hi"}], '
            b'"temperature": NaN}', "temperature", "is NaN, but it should be a finite number"),
    refused("temperature infinite", b'{"model": "preset:tiny", "messages": [{"role": "user", "content": "Hi"}], '
            b'"temperature": 1e999}', "temperature", "should be a finite number"),
    refused("temperature a string", chat(temperature="1"), "temperature", "is \"1\", but it should be a valid number"),
    refused("temperature true", chat(temperature=True), "temperature", "is true, but it should be a valid number"),
    refused("top_p below", chat(top_p=-0.1), "top_p", "is -0.1, but it should be greater than or equal to 0"),
    refused("a penalty below", chat(presence_penalty=-3), "presence_penalty", "is -3, but it should be"),
    refused("a penalty above", chat(frequency_penalty=2.1), "frequency_penalty", "is 2.1, but it should be"),
    refused("no token", chat(max_tokens=0), "max_tokens", "is 0, but it should be greater than or equal to 1"),
    refused("too many tokens", chat(max_tokens=513), "max_tokens", "is 513, but at most 512 are accepted"),
    refused("too many by the newer name", chat(max_completion_tokens=513, max_tokens=1), "max_completion_tokens",
            "is 513, but at most 512 are accepted"),
    refused("half a token", chat(max_tokens=1.5), "max_tokens", "is 1.5, but it should be a valid integer"),
    refused("more at least than at most", chat(min_tokens=9, max_tokens=8), "min_tokens",
            "is 9, but it should be at most its max_tokens, which is 8"),
    refused("min_tokens below", chat(min_tokens=-1), "min_tokens", "is -1, but it should be greater than"),
    refused("a seed above", chat(seed=2**63), "seed", "is 9223372036854775808, but it should be"),
    refused("a seed below", chat(seed=-(2**63) - 1), "seed", "but it should be greater than or equal to"),
    refused("seed a number with a point", chat(seed=1.5), "seed", "is 1.5, but it should be a valid integer"),
    refused("five stops", chat(stop=list("abcde")), "stop", "but it should have at most 4 strings"),
    refused("an empty stop among others", chat(stop=["a", ""]), "stop[1]", "should not be empty"),
    refused("a long stop", chat(stop="x" * 257), "stop", "but it should have at most 256 characters"),
    refused("a long stop among others", chat(stop=["a", "x" * 257]), "stop[1]",
            "but it should have at most 256 characters"),
    refused("stop a number", chat(stop=5), "stop", "is 5, but it should be a string or a list of strings"),
    refused("ignore_eos a number", chat(ignore_eos=1), "ignore_eos", "is 1, but it should be a valid boolean"),
    refused("a bias too large", chat(logit_bias={"5": 101}), "logit_bias.5", "should be less than or equal to 100"),
    refused("a bias of no token", chat(logit_bias={"a": 1}), "logit_bias", "should have token ids as keys"),
    refused("a bias of what is no token", chat(logit_bias={"2147483648": 1}), "logit_bias", "should have token ids as"),
    unsupported("a template", chat(chat_template="{{ 1 }}"), "chat_template", "the checkpoint's own one is used"),
    unsupported("thoughts by the template", chat(chat_template_kwargs={"enable_thinking": True}),
                "chat_template_kwargs.enable_thinking", "is true, which is not supported"),
    unsupported("functions of the old form", chat(functions=[{"name": "f"}]), "functions", "use tools"),
    unsupported("a misspelt field", chat(top_kk=5), "top_kk",
                "is 5, which is not supported; use top_k, or leave it out"),
    unsupported("an invented field", chat(sparkle=1), "sparkle", "is 1, which is not supported; leave it out."),
    unsupported("a beam", chat(use_beam_search=True), "use_beam_search", "is true, which is not supported"),
    unsupported("the best of two", chat(best_of=2), "best_of", "leave it out or send 1"),
    unsupported("a prediction", chat(prediction={"type": "content"}), "prediction", "which is not supported"),
    unsupported("images beside the messages", chat(images=["data:,"]), "images", "in a content part of type image_url"),
    refused("two voices", chat(audio={"voice": "Ethan"}, speaker="Chelsie"), "speaker", "differ; send one of them"),
    refused("an answer of another kind", chat(response_format={"type": "xml"}), "response_format.type",
            "should be 'text', 'json_object' or"),
    refused("a schema of what is not supported", chat(guided_json={"type": "integer", "multipleOf": 5}),
            "guided_json.multipleOf", "is not supported; leave it out"),
    refused("a schema that is none", chat(guided_json={"$ref": "#/$defs/none"}), "guided_json", "is invalid, or has"),
    refused("a pattern that is none", chat(structured_outputs={"regex": "(a"}), "structured_outputs.regex",
            "is invalid, or has"),
    refused("a pattern of millions", chat(guided_regex="((a{0,100}){0,100}){0,100}"), "guided_regex",
            "with its repetitions written out"),
)  # fmt: skip


def by_place(*entries: Any) -> dict[str, Any]:
    return chat(sampling_params_list=list(entries))


def by_name(**entries: Any) -> dict[str, Any]:
    return chat(stage_sampling_params=entries)


STAGES = (
    refused("an entry too few", by_place(None, None), "sampling_params_list",
            "has 2 entries, but it should have one a stage: thinker, talker, code2wav"),
    refused("an entry too many", by_place(None, None, None, None), "sampling_params_list", "has 4 entries"),
    refused("an entry a number", by_place(1, None, None), "sampling_params_list[0]", "is 1"),
    unsupported("an unknown name", by_place({"heat": 1}, None, None), "sampling_params_list[0].heat",
                "which is not supported; leave it out"),
    unsupported("a name of vLLM's that is not for clients", by_name(talker={"n": 2}), "stage_sampling_params.talker.n",
                "which is not supported; leave it out"),
    refused("an unknown stage", by_name(speaker={"top_k": 5}), "stage_sampling_params",
            "has an entry 'speaker', but the stages are thinker, talker, code2wav"),
    refused("both ways at once", by_place(None, {"top_k": 5}, None) | by_name(talker={"top_k": 5}),
            "stage_sampling_params", "are both given; send one of them"),
    refused("too many codes", by_name(talker={"max_tokens": 2049}), "stage_sampling_params.talker.max_tokens",
            "is 2049, but at most 2048 are accepted"),
    refused("too many text tokens, by place", by_place({"max_tokens": 513}, None, None),
            "sampling_params_list[0].max_tokens", "is 513, but at most 512 are accepted"),
    refused("stops where no text is", by_name(talker={"stop": ["x"]}), "stage_sampling_params.talker.stop",
            "is for stage talker, which makes no text; leave it out"),
    refused("more at least than at most codes", by_name(talker={"min_tokens": 9, "max_tokens": 8}),
            "stage_sampling_params.talker.min_tokens", "is 9, but it should be at most its max_tokens, which is 8"),
    refused("a temperature below", by_name(talker={"temperature": -1}), "stage_sampling_params.talker.temperature",
            "is -1, but it should be greater than or equal to 0"),
    refused("a repetition penalty of none", by_place(None, {"repetition_penalty": 0}, None),
            "sampling_params_list[1].repetition_penalty", "is 0, but it should be greater than or equal to 0.01"),
    refused("a repetition penalty that float32 has not", by_name(talker={"repetition_penalty": 1e-300}),
            "stage_sampling_params.talker.repetition_penalty", "is 1e-300, but it should be greater than or equal to"),
    refused("a repetition penalty beyond all use", by_name(talker={"repetition_penalty": 1e308}),
            "stage_sampling_params.talker.repetition_penalty", "is 1e+308, but it should be less than or equal to 100"),
    refused("too many ids that stop", by_place({"stop_token_ids": [1] * 65}, None, None),
            "sampling_params_list[0].stop_token_ids", "but it should have at most 64 entries"),
    refused("more tokens at least than are counted", by_place(None, {"min_tokens": 2**31}, None),
            "sampling_params_list[1].min_tokens", "but it should be less than or equal to 2147483647"),
    refused("a token id below", by_name(talker={"stop_token_ids": [-1]}),
            "stage_sampling_params.talker.stop_token_ids[0]", "is -1, but it should be"),
    refused("top_k below", by_name(talker={"top_k": -2}), "stage_sampling_params.talker.top_k", "is -2, but it"),
)  # fmt: skip


def in_speech(name: str, fields: Mapping[str, Any], param: str, words: str, **more: Any) -> BadInput:
    return refused(name, speech(**fields), param, words, path=SPEECH, **more)


SPOKEN = (
    missing("no text", {"model": MODEL}, "input", path=SPEECH),
    in_speech("spoken by another", {"model": "tts-1"}, "model", "\"tts-1\" does not exist; use one of preset:tiny",
              code="model_not_found", status=404),
    in_speech("an empty text", {"input": ""}, "input", "should not be empty"),
    in_speech("a long text", {"input": "x" * 4097}, "input", ", but it should have at most 4096 characters"),
    in_speech("a text of more sound than may be made", {"input": "x" * 2049}, "input", "at most 2048 can be spoken"),
    in_speech("a text no string", {"input": ["Hi."]}, "input", "but it should be a valid string"),
    in_speech("speech in a new voice", {"voice": "Bob"}, "voice", "is \"Bob\", but the voices are Chelsie, Ethan"),
    in_speech("speech in another voice's id", {"voice": {"id": "Bob"}}, "voice", "but the voices are Chelsie, Ethan"),
    in_speech("speech in a new speaker's voice", {"speaker": "Bob"}, "speaker", "but the voices are Chelsie, Ethan"),
    in_speech("a voice no string", {"voice": 3}, "voice", "is 3, but it should be a name or {'id': <name>}"),
    in_speech("an id no string", {"voice": {"id": None}}, "voice.id", "is null, but it should be a valid string"),
    in_speech("another file", {"response_format": "m4a"}, "response_format", "is \"m4a\", but it should be 'wav'"),
    in_speech("twice as fast", {"speed": 2}, "speed", "is 2, which is not supported; leave it out or send 1",
              code="unsupported_parameter"),
    in_speech("half as fast", {"speed": 0.5}, "speed", "leave it out or send 1", code="unsupported_parameter"),
    in_speech("another rate", {"sample_rate": 16_000}, "sample_rate", "leave it out or send 24000",
              code="unsupported_parameter"),
    in_speech("a voice to copy", {"ref_audio": "data:,"}, "ref_audio", "the voices are the model's own",
              code="unsupported_parameter"),
    in_speech("sampling of speech", {"top_k": 5}, "top_k", "which is not supported", code="unsupported_parameter"),
    in_speech("a stream of another form", {"stream_format": "chunks"}, "stream_format", "should be 'sse' or 'audio'"),
    in_speech("a seed of speech below", {"seed": -(2**63) - 1}, "seed", "but it should be greater than or equal to"),
    in_speech("a seed of speech above", {"seed": 2**63}, "seed", "but it should be less than or equal"),
)  # fmt: skip


def in_response(name: str, fields: Mapping[str, Any], param: str | None, words: str, **more: Any) -> BadInput:
    return refused(name, {"model": MODEL, "input": "Hi.", **fields}, param, words, path=RESPONSES, **more)


def not_in_response(name: str, fields: Mapping[str, Any], param: str, words: str) -> BadInput:
    return in_response(name, fields, param, words, code="unsupported_parameter")


RESPONSE = (
    missing("a response to nothing", {"model": MODEL}, "input", path=RESPONSES),
    refused("a response that was", b"", None, "\"resp_1\" does not exist: no response is kept",
            code="response_not_found", status=404, method="GET", path=f"{RESPONSES}/resp_1"),
    refused("a response to be cancelled", b"", None, "no response is kept",
            code="response_not_found", status=404, path=f"{RESPONSES}/resp_1/cancel"),
    refused("a count of a response's tokens", {}, None, "is no path of this API", code="unknown_url", status=404,
            path=f"{RESPONSES}/input_tokens"),
    in_response("a response by another model", {"model": "gpt"}, "model", "\"gpt\" does not exist",
                code="model_not_found", status=404),
    not_in_response("a later turn of what is not kept", {"previous_response_id": "resp_1"}, "previous_response_id",
                    "no answer is kept: send the whole conversation as input"),
    not_in_response("a response in the background", {"background": True}, "background", "is given at once"),
    not_in_response("a response that is heard", {"modalities": ["audio"]}, "modalities", "use /v1/chat/completions"),
    in_response("a tool of the server's", {"tools": [{"type": "web_search"}]}, "tools[0].type", "is \"web_search\""),
    in_response("an item of an earlier answer", {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id",
                "none is kept; send the item itself"),
    in_response("a picture that is none", {"input": [{"role": "user", "content": [
                {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]},
                "input[0].content[0].image_url", "input[0].content[0].image_url", status=415,
                code="unsupported_image"),
    in_response("a response of many tokens", {"max_output_tokens": 10**6}, "max_output_tokens", "is 1000000, but at"),
)  # fmt: skip

BAD_INPUTS = (*ROUTES, *BODIES, *MESSAGES, *MEDIA, *VIDEOS, *TOOLS_AND_LOGPROBS, *URLS, *OPTIONS, *STAGES, *SPOKEN,
              *FORMS, *TEXTS, *RESPONSE)  # fmt: skip
