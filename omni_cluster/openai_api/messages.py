"""The messages of a chat: what their parts may be, and their media under limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag

from omni_cluster.media import Video
from omni_cluster.openai_api.budget import Budget
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.limits import ApiLimits
from omni_cluster.openai_api.media import Picture, decode_audio, decode_base64, read_picture
from omni_cluster.openai_api.sound_formats import AudioFormat, audio_format_of
from omni_cluster.openai_api.tools import MAX_ID_CHARS, ToolCall, template_calls
from omni_cluster.openai_api.video import decode_video, take_frames, video_of_frames
from omni_cluster.openai_api.wire import SOME, Text, Unsupported, Wire, at_most, not_blank, shown, string_or_list

TemplateMessage = dict[str, Any]

DEFAULT_FPS = 2.0
"""Frames a second that the model is shown of a video: the reference's."""
MAX_FPS = 60.0
MAX_PARTS = 1024
"""Of one message."""
MAX_CALLS = 128
"""Of one message."""
MAX_URL_CHARS = 8192
"""Of an http(s) URL."""


_Fps = Annotated[float, Field(gt=0, le=MAX_FPS)]


class TextPart(Wire):
    """What of a message is text."""

    type: Literal["text"]
    text: str


class _ImageUrl(Wire):
    url: Text


class _ImagePart(Wire):
    type: Literal["image_url"]
    image_url: _ImageUrl


class _InputAudio(Wire):
    data: Text
    format: AudioFormat


class _AudioPart(Wire):
    type: Literal["input_audio"]
    input_audio: _InputAudio


class _AudioUrl(Wire):
    url: Text


class _AudioUrlPart(Wire):
    type: Literal["audio_url"]
    audio_url: _AudioUrl


class _VideoUrl(Wire):
    url: Text


class _VideoUrlPart(Wire):
    type: Literal["video_url"]
    video_url: _VideoUrl
    fps: _Fps | None = None


class _FramesPart(Wire):
    """A video as a list of pictures, which is DashScope's way."""

    type: Literal["video"]
    video: Annotated[list[Text], AfterValidator(not_blank), SOME]
    fps: _Fps | None = None


def _part_type(part: object) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return f"#{kind}" if isinstance(kind, str) else None


_MediaPart = _ImagePart | _AudioPart | _AudioUrlPart | _VideoUrlPart | _FramesPart

# A tag is part of pydantic's error path; the "#" tells it from the client's own keys, so that it can be taken out.
_Part = Annotated[
    Annotated[TextPart, Tag("#text")]
    | Annotated[_ImagePart, Tag("#image_url")]
    | Annotated[_AudioPart, Tag("#input_audio")]
    | Annotated[_AudioUrlPart, Tag("#audio_url")]
    | Annotated[_VideoUrlPart, Tag("#video_url")]
    | Annotated[_FramesPart, Tag("#video")],
    Discriminator(
        _part_type,
        custom_error_type="part_type",
        custom_error_message="should be 'text', 'image_url', 'input_audio', 'audio_url', 'video_url' or 'video'",
    ),
]
_Content = Annotated[
    Annotated[str, Tag("#string")]
    | Annotated[list[_Part], AfterValidator(not_blank), SOME, at_most(MAX_PARTS), Tag("#list")],
    Discriminator(
        string_or_list,
        custom_error_type="string_or_list",
        custom_error_message="should be a string or a list of content parts",
    ),
]


_ONLY_TEXT = {"type": ["string", "array"], "items": {"properties": {"type": {"const": "text"}}}}
_NO_CALLS = {"type": ["array", "null"], "maxItems": 0}
# For OpenAPI alone: what `check_messages` says in sentences of ours.
_BY_ROLE: list[Any] = [
    {
        "properties": {"role": {"const": "user"}, "content": {"type": ["string", "array"]}, "tool_calls": _NO_CALLS},
        "required": ["content"],
    },
    {
        "properties": {
            "role": {"enum": ["system", "assistant", "tool"]},
            "content": _ONLY_TEXT,
            "tool_calls": _NO_CALLS,
        },
        "required": ["content"],
    },
    {
        "properties": {
            "role": {"const": "assistant"},
            "content": {**_ONLY_TEXT, "type": ["string", "array", "null"]},
            "tool_calls": {"type": "array", "minItems": 1},
        },
        "required": ["tool_calls"],
    },
]


class Message(Wire):
    """One of a chat's, as it came; `content` is None where the assistant only called tools."""

    model_config = ConfigDict(json_schema_extra={"anyOf": _BY_ROLE})

    role: Literal["system", "user", "assistant", "tool"]
    # OpenAI's clients may name an earlier spoken answer by its id instead of giving content; no answer is kept here.
    audio: Unsupported = None
    content: _Content | None = None
    tool_calls: Annotated[list[ToolCall], at_most(MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, at_most(MAX_ID_CHARS)] | None = None
    function_call: Unsupported = None


@dataclass(frozen=True)
class MediaUrl:
    """An http(s) URL in a request, to be fetched, and the path of the field that holds it."""

    param: str
    url: str


def media_urls(messages: Sequence[Message]) -> tuple[MediaUrl, ...]:
    """What must be fetched for the messages. Raises BadRequest for a URL that is too long."""
    sources = [source for param, _, part in _media_parts(messages) for source in _sources(param, part)]
    urls = tuple(MediaUrl(param, value) for param, value in sources if _is_url(value))
    for each in urls:
        _check_url(each)
    return urls


def _check_url(each: MediaUrl) -> None:
    if len(each.url) > MAX_URL_CHARS:
        raise _invalid(
            each.param,
            f"{each.param} is a URL of {len(each.url)} characters, but at most {MAX_URL_CHARS} are accepted.",
        )


def check_messages(messages: Sequence[Message], limits: ApiLimits, *, use_audio_in_video: bool) -> None:
    """Raises BadRequest for what can be told before any media are fetched or decoded."""
    for index, message in enumerate(messages):
        _check_content(f"messages[{index}]", message)
    rooms = {"images": limits.max_image_parts, "audio inputs": limits.max_audio_parts, "videos": limits.max_video_parts}
    seen = dict.fromkeys(rooms, 0)
    for param, role, part in _media_parts(messages):
        _check_role(param, role, part)
        kind = _kind(part)
        seen[kind] += 1
        _check_room(kind, seen[kind], rooms[kind], _sources(param, part)[0][0])
        if isinstance(part, _FramesPart):
            _check_frames(f"{param}.video", part, limits, use_audio_in_video)


def _check_content(param: str, message: Message) -> None:
    calls = message.role == "assistant" and message.tool_calls
    if message.content is None and not calls:
        raise BadRequest(f"{param}.content is required.", param=f"{param}.content", code="missing_required_parameter")
    if message.tool_calls and not calls:
        name = f"{param}.tool_calls"
        raise _invalid(name, f"{name} is in a message of the {message.role}, but only the assistant calls tools.")


def _check_role(param: str, role: str, part: _MediaPart) -> None:
    if role != "user":
        raise _invalid(
            param, f"{param} is {part.type} in a message of the {role}, but only user messages may hold media."
        )


def _check_frames(param: str, part: _FramesPart, limits: ApiLimits, use_audio_in_video: bool) -> None:
    if use_audio_in_video:
        raise _invalid(
            param,
            f"{param} is a list of pictures, which has no sound; leave use_audio_in_video out or send a video_url.",
        )
    most = limits.video.most_frames
    if len(part.video) > most:
        raise _too_many(f"{param} has {len(part.video)} frames, but at most {most} are accepted.", param)


def _check_room(what: str, count: int, most: int, param: str) -> None:
    if count > most:
        raise _too_many(f"The request has more than {most} {what}, which is the most that is accepted.", param)


def _too_many(sentence: str, param: str) -> BadRequest:
    return BadRequest(sentence, param=param, code="too_many_media", status=413)


def _invalid(param: str, sentence: str) -> BadRequest:
    return BadRequest(sentence, param=param, code="invalid_value")


def _media_parts(messages: Sequence[Message]) -> Iterator[tuple[str, str, _MediaPart]]:
    """Path, role and part of each media part."""
    for index, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for i, part in enumerate(message.content):
            if not isinstance(part, TextPart):
                yield f"messages[{index}].content[{i}]", message.role, part


def _kind(part: _MediaPart) -> str:
    if isinstance(part, _ImagePart):
        return "images"
    return "videos" if isinstance(part, _VideoUrlPart | _FramesPart) else "audio inputs"


def _sources(param: str, part: _MediaPart) -> list[tuple[str, str]]:
    """The paths of the fields that hold the media or their URLs, and what they hold."""
    if isinstance(part, _ImagePart):
        return [(f"{param}.image_url.url", part.image_url.url)]
    if isinstance(part, _AudioUrlPart):
        return [(f"{param}.audio_url.url", part.audio_url.url)]
    if isinstance(part, _VideoUrlPart):
        return [(f"{param}.video_url.url", part.video_url.url)]
    if isinstance(part, _FramesPart):
        return [(f"{param}.video[{i}]", frame) for i, frame in enumerate(part.video)]
    return [(f"{param}.input_audio.data", part.input_audio.data)]


def _is_url(value: str) -> bool:
    return value[:8].lower().startswith(("http://", "https://"))


def has_media(messages: Sequence[Message]) -> bool:
    return any(True for _ in _media_parts(messages))


class MessageReader:
    """Turns messages into template form and gathers their media.

    The headers of all pictures are read before any media are decoded.

    `fetched`: what each of `media_urls` led to, by its param. Raises BadRequest for media that cannot be used.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        limits: ApiLimits,
        fetched: Mapping[str, bytes],
        *,
        use_audio_in_video: bool = False,
    ) -> None:
        self._limits = limits
        self._fetched = fetched
        self._use_audio_in_video = use_audio_in_video
        self.audios: list[npt.NDArray[np.float32]] = []
        self.images: list[npt.NDArray[np.uint8]] = []
        self.videos: list[Video] = []
        self._budget = Budget(limits.max_decoded_bytes)
        self._pictures: dict[str, Picture] = {}
        for param, _, part in _media_parts(messages):
            self._read_headers(param, part)

    def _read_headers(self, param: str, part: _MediaPart) -> None:
        if not isinstance(part, _ImagePart | _FramesPart):
            return
        read = {name: self._picture(name, value) for name, value in _sources(param, part)}
        self._pictures |= read
        if isinstance(part, _FramesPart):
            take_frames(list(read.values()), self._limits.video, self._budget, f"{param}.video")
            return
        for name, picture in read.items():
            self._budget.take(picture.decoded_bytes, name)

    def _picture(self, param: str, value: str) -> Picture:
        data = self._data(param, value, must_be_url=True)
        return read_picture(data, max_pixels=self._limits.max_image_pixels, param=param)

    def read(self, index: int, message: Message) -> TemplateMessage:
        param = f"messages[{index}]"
        read: TemplateMessage = {"role": message.role, "content": self._content(f"{param}.content", message.content)}
        if message.tool_calls:
            read["tool_calls"] = template_calls(message.tool_calls, f"{param}.tool_calls")
        if message.tool_call_id is not None:
            read["tool_call_id"] = message.tool_call_id
        return read

    def _content(self, param: str, content: _Content | None) -> list[dict[str, str]]:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        return [self._part(f"{param}[{i}]", part) for i, part in enumerate(content or ())]

    def _part(self, param: str, part: TextPart | _MediaPart) -> dict[str, str]:
        if isinstance(part, TextPart):
            return {"type": "text", "text": part.text}
        if isinstance(part, _ImagePart):
            self.images.append(self._pictures[_sources(param, part)[0][0]].decode())
            return {"type": "image"}
        if isinstance(part, _VideoUrlPart | _FramesPart):
            self.videos.append(self._frames(param, part) if isinstance(part, _FramesPart) else self._video(param, part))
            return {"type": "video"}
        self.audios.append(self._audio(param, part))
        return {"type": "audio"}

    def _audio(self, param: str, part: _AudioPart | _AudioUrlPart) -> npt.NDArray[np.float32]:
        ((name, value),) = _sources(param, part)
        data = self._data(name, value, must_be_url=isinstance(part, _AudioUrlPart))
        label = part.input_audio.format if isinstance(part, _AudioPart) else None
        kind = audio_format_of(data, name, label)
        samples = decode_audio(data, format=kind, max_s=self._limits.max_audio_s, param=name)
        self._budget.take(samples.nbytes, name)
        return samples

    def _video(self, param: str, part: _VideoUrlPart) -> Video:
        ((name, value),) = _sources(param, part)
        return decode_video(
            self._data(name, value, must_be_url=True),
            limits=self._limits.video,
            fps=part.fps or DEFAULT_FPS,
            with_audio=self._use_audio_in_video,
            max_audio_s=self._limits.max_audio_s,
            budget=self._budget,
            param=name,
        )

    def _frames(self, param: str, part: _FramesPart) -> Video:
        frames = [self._pictures[name] for name, _ in _sources(param, part)]
        fps = part.fps or DEFAULT_FPS
        return video_of_frames(frames, fps=fps, limits=self._limits.video, param=f"{param}.video")

    def _data(self, param: str, value: str, *, must_be_url: bool) -> bytes:
        if _is_url(value):
            return self._fetched[param]
        if must_be_url and value[:5].lower() != "data:":
            raise _invalid(
                param, f"{param} is {shown(value)}, but it should be an http(s) URL or 'data:<type>;base64,<data>'."
            )
        return decode_base64(value, self._limits.max_media_bytes, param)
