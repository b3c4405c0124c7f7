"""The messages of a chat: what their parts may be, and their media under limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, ConfigDict, Tag

from omni_cluster.openai_api.budget import Budget
from omni_cluster.openai_api.errors import BadRequest, invalid
from omni_cluster.openai_api.fields import Others, nothings
from omni_cluster.openai_api.limits import ApiLimits
from omni_cluster.openai_api.media import Picture, decode_audio, decode_base64, read_picture
from omni_cluster.openai_api.parts import (
    DEFAULT_FPS,
    MEDIUM_NAMES,
    OF_A_PART,
    AudioPart,
    MediaPart,
    Part,
    RefusalPart,
    TextPart,
    VideoPart,
    VideoUrlPart,
    media_sources,
    medium_of,
)
from omni_cluster.openai_api.sound_formats import audio_format_of
from omni_cluster.openai_api.tools import MAX_ID_CHARS, Tool, ToolCall, template_calls
from omni_cluster.openai_api.video import decode_video, take_frames, video_of_frames
from omni_cluster.openai_api.wire import SOME, Wire, at_most, by_json_type, not_blank, shown
from omni_cluster.types.media import Video

TemplateMessage = dict[str, Any]

MAX_PARTS = 1024
"""Of one message."""
MAX_CALLS = 128
"""Of one message."""
MAX_URL_CHARS = 8192
"""Of an http(s) URL."""


_Content = Annotated[
    Annotated[str, Tag("#string")]
    | Annotated[list[Part], AfterValidator(not_blank), SOME, at_most(MAX_PARTS), Tag("#list")],
    by_json_type("should be a string or a list of content parts"),
]


_TEXT_TYPES = ["text", "input_text", "output_text", "refusal"]
_ONLY_TEXT = {"type": ["string", "array"], "items": {"properties": {"type": {"enum": _TEXT_TYPES}}}}
_NOT_OF_AN_ANSWER = {name: {"enum": nothings()} for name in ("tool_calls", "audio", "refusal")}
# For OpenAPI alone: what `check_messages` says in sentences of ours.
_BY_ROLE: list[Any] = [
    {
        "properties": {
            "role": {"const": "user"},
            "content": {"type": ["string", "array"]},
            **_NOT_OF_AN_ANSWER,
        },
        "required": ["content"],
    },
    {
        "properties": {
            "role": {"enum": ["system", "developer", "tool"]},
            "content": _ONLY_TEXT,
            **_NOT_OF_AN_ANSWER,
        },
        "required": ["content"],
    },
    {"properties": {"role": {"const": "assistant"}, "content": {**_ONLY_TEXT, "type": ["string", "array", "null"]}}},
]


class _EarlierAudio(Wire):
    """The sound of an earlier answer, of which the model is shown the text."""

    others = Others(ignored=frozenset({"data", "expires_at", "format", "voice"}))

    id: Annotated[str, at_most(MAX_ID_CHARS)] | None = None
    transcript: str | None = None


class Message(Wire):
    """One of a chat's, as it came; `content` is None where the assistant said no text."""

    model_config = ConfigDict(json_schema_extra={"anyOf": _BY_ROLE})
    # Templates have no place for names, and thoughts of earlier turns are left out by those that know of any.
    others = Others(
        ignored=frozenset({"name", "annotations", "reasoning", "reasoning_content"}) | OF_A_PART,
        instead={"function_call": "use tool_calls"},
    )
    kept: ClassVar[Mapping[str, tuple[type, ...]]] = {"content": (str, list)}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    audio: _EarlierAudio | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], at_most(MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, at_most(MAX_ID_CHARS)] | None = None

    @property
    def texts(self) -> Iterator[str]:
        """All text of it that the model is shown."""
        if isinstance(self.content, str):
            yield self.content
        elif self.content is not None:
            yield from (part.text for part in self.content if isinstance(part, TextPart | RefusalPart))
        elif self.audio and self.audio.transcript:
            yield self.audio.transcript
        if self.refusal:
            yield self.refusal


@dataclass(frozen=True)
class MediaUrl:
    """An http(s) URL in a request, to be fetched, and the path of the field that holds it."""

    param: str
    url: str


def media_urls(messages: Sequence[Message]) -> tuple[MediaUrl, ...]:
    """What must be fetched for the messages. Raises BadRequest for a URL that is too long."""
    sources = [source for param, _, part in _media_parts(messages) for source in media_sources(param, part)]
    urls = tuple(MediaUrl(param, value) for param, value in sources if _is_url(value))
    for each in urls:
        _check_url(each)
    return urls


def _check_url(each: MediaUrl) -> None:
    if len(each.url) > MAX_URL_CHARS:
        raise invalid(
            each.param,
            f"{each.param} is a URL of {len(each.url)} characters, but at most {MAX_URL_CHARS} are accepted.",
        )


def check_messages(
    messages: Sequence[Message], tools: Sequence[Tool], limits: ApiLimits, *, use_audio_in_video: bool
) -> None:
    """Raises BadRequest for what is known before any media are fetched or decoded."""
    for index, message in enumerate(messages):
        _check_content(f"messages[{index}]", message)
    rooms = {"image": limits.max_image_parts, "audio": limits.max_audio_parts, "video": limits.max_video_parts}
    seen = dict.fromkeys(rooms, 0)
    for param, role, part in _media_parts(messages):
        _check_role(param, role, part)
        medium = medium_of(part)
        seen[medium] += 1
        _check_room(MEDIUM_NAMES[medium], seen[medium], rooms[medium], media_sources(param, part)[0][0])
        if isinstance(part, VideoPart) and isinstance(part.video, list):
            _check_frames(f"{param}.video", part.video, limits, use_audio_in_video)
        if isinstance(part, VideoUrlPart):
            _check_number_of_frames(param, part)
    _check_text(messages, tools, limits)


def _check_text(messages: Sequence[Message], tools: Sequence[Tool], limits: ApiLimits) -> None:
    """Raises BadRequest for text that no prompt has room for, before it is rendered."""
    chars = sum(len(text) for text in _texts(messages, tools))
    if chars > limits.max_text_chars:
        raise BadRequest(
            f"This model's maximum context length is {limits.max_prompt_tokens} tokens: the messages and tools have "
            f"{chars} characters of text, but at most {limits.max_text_chars} are accepted.",
            param="messages",
            code="context_length_exceeded",
        )


def _texts(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[str]:
    for message in messages:
        yield from message.texts
        yield message.tool_call_id or ""
        for call in message.tool_calls or ():
            yield from (call.id, call.function.name, call.function.arguments)
    yield from (tool.model_dump_json(exclude_none=True) for tool in tools)


def _check_content(param: str, message: Message) -> None:
    if message.role != "assistant":
        if message.content is None:
            name = f"{param}.content"
            raise BadRequest(f"{name} is required.", param=name, code="missing_required_parameter")
        _check_only_answers_have(param, message)
    elif message.audio and message.content is None and not (message.audio.transcript or message.refusal):
        name = f"{param}.audio"
        what = f"names the answer {shown(message.audio.id)}" if message.audio.id else "has no transcript"
        raise invalid(name, f"{name} {what}, but no answer is kept here; send its text as content.")


def _check_only_answers_have(param: str, message: Message) -> None:
    for field in ("tool_calls", "audio", "refusal"):
        if getattr(message, field) is not None:
            name, verb = f"{param}.{field}", "calls tools" if field == "tool_calls" else "has it"
            raise invalid(name, f"{name} is in a message of the {message.role}, but only the assistant {verb}.")


def _check_role(param: str, role: str, part: MediaPart) -> None:
    if role != "user":
        raise invalid(
            param, f"{param} is {part.type} in a message of the {role}, but only user messages may hold media."
        )


def _check_frames(param: str, frames: Sequence[str], limits: ApiLimits, use_audio_in_video: bool) -> None:
    if use_audio_in_video:
        raise invalid(
            param,
            f"{param} is a list of pictures, which has no sound; leave use_audio_in_video out or send a video_url.",
        )
    most = limits.video.most_frames
    if len(frames) > most:
        raise _too_many(f"{param} has {len(frames)} frames, but at most {most} are accepted.", param)


def _check_number_of_frames(param: str, part: VideoUrlPart) -> None:
    if part.fps is not None and part.num_frames is not None:
        raise invalid(f"{param}.fps", f"{param}.fps and {param}.video_url.num_frames are both given; send one of them.")


def _check_room(what: str, count: int, most: int, param: str) -> None:
    if count > most:
        raise _too_many(f"The request has more than {most} {what}, which is the most that is accepted.", param)


def _too_many(sentence: str, param: str) -> BadRequest:
    return BadRequest(sentence, param=param, code="too_many_media", status=413)


def _media_parts(messages: Sequence[Message]) -> Iterator[tuple[str, str, MediaPart]]:
    """Path, role and part of each media part."""
    for index, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for i, part in enumerate(message.content):
            if not isinstance(part, TextPart | RefusalPart):
                yield f"messages[{index}].content[{i}]", message.role, part


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

    def _read_headers(self, param: str, part: MediaPart) -> None:
        is_frames = isinstance(part, VideoPart) and isinstance(part.video, list)
        if not (is_frames or medium_of(part) == "image"):
            return
        read = {name: self._picture(name, value) for name, value in media_sources(param, part)}
        self._pictures |= read
        if is_frames:
            take_frames(list(read.values()), self._limits.video, self._budget, f"{param}.video")
            return
        for name, picture in read.items():
            self._budget.take(picture.decoded_bytes, name)

    def _picture(self, param: str, value: str) -> Picture:
        data = self._data(param, value, must_be_url=True)
        return read_picture(data, max_pixels=self._limits.max_image_pixels, param=param)

    def read(self, index: int, message: Message) -> TemplateMessage:
        param = f"messages[{index}]"
        role = "system" if message.role == "developer" else message.role
        read: TemplateMessage = {"role": role, "content": self._content(f"{param}.content", message)}
        if message.tool_calls:
            read["tool_calls"] = template_calls(message.tool_calls)
        if message.tool_call_id is not None:
            read["tool_call_id"] = message.tool_call_id
        return read

    def _content(self, param: str, message: Message) -> list[dict[str, str]]:
        if not isinstance(message.content, list):
            return [_text(text) for text in message.texts]
        parts = [self._part(f"{param}[{i}]", part) for i, part in enumerate(message.content)]
        return [*parts, _text(message.refusal)] if message.refusal else parts

    def _part(self, param: str, part: TextPart | RefusalPart | MediaPart) -> dict[str, str]:
        if isinstance(part, TextPart | RefusalPart):
            return _text(part.text)
        medium = medium_of(part)
        if medium == "image":
            self.images.append(self._pictures[media_sources(param, part)[0][0]].decode())
        elif medium == "audio":
            self.audios.append(self._audio(param, part))
        else:
            self.videos.append(self._video(param, part))
        return {"type": medium}

    def _audio(self, param: str, part: MediaPart) -> npt.NDArray[np.float32]:
        ((name, value),) = media_sources(param, part)
        data = self._data(name, value, must_be_url=not isinstance(part, AudioPart))
        label = part.input_audio.format if isinstance(part, AudioPart) else None
        kind = audio_format_of(data, name, label)
        samples = decode_audio(data, format=kind, max_s=self._limits.max_audio_s, param=name)
        self._budget.take(samples.nbytes, name)
        return samples

    def _video(self, param: str, part: MediaPart) -> Video:
        sources, fps = media_sources(param, part), getattr(part, "fps", None) or DEFAULT_FPS
        if isinstance(part, VideoPart) and isinstance(part.video, list):
            frames = [self._pictures[name] for name, _ in sources]
            return video_of_frames(frames, fps=fps, limits=self._limits.video, param=f"{param}.video")
        ((name, value),) = sources
        return decode_video(
            self._data(name, value, must_be_url=True),
            limits=self._limits.video,
            fps=fps,
            num_frames=part.num_frames if isinstance(part, VideoUrlPart) else None,
            with_audio=self._use_audio_in_video,
            max_audio_s=self._limits.max_audio_s,
            budget=self._budget,
            param=name,
        )

    def _data(self, param: str, value: str, *, must_be_url: bool) -> bytes:
        if _is_url(value):
            return self._fetched[param]
        if must_be_url and value[:5].lower() != "data:":
            raise invalid(
                param, f"{param} is {shown(value)}, but it should be an http(s) URL or 'data:<type>;base64,<data>'."
            )
        return decode_base64(value, self._limits.max_media_bytes, param)


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
