"""The parts of a message: text and media, as OpenAI's clients write them and as others do."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from omni_cluster.openai_api.fields import Others
from omni_cluster.openai_api.sound_formats import AudioFormat
from omni_cluster.openai_api.wire import SOME, Text, Wire, by_json_type, not_blank

DEFAULT_FPS = 2.0
"""Frames a second that the model is shown of a video: the reference's."""
MAX_FPS = 60.0
_Fps = Annotated[float, Field(gt=0, le=MAX_FPS)]

Medium = Literal["image", "audio", "video"]
_MEDIA: tuple[Medium, ...] = ("image", "audio", "video")
MEDIUM_NAMES: Mapping[Medium, str] = {"image": "images", "audio": "audio inputs", "video": "videos"}

OF_A_PART = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""What is said of a part to other services' prompt caches."""


class TextPart(Wire):
    """What of a message is text."""

    # Of an earlier answer by the API of responses.
    others = Others(ignored=OF_A_PART | {"annotations", "logprobs", "parsed"})

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Wire):
    """What of an earlier answer is text too."""

    others = Others(ignored=OF_A_PART)

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class _ImageUrl(Wire):
    # A picture has one resolution here: as many tokens as its pixels come to.
    others = Others(ignored=frozenset({"detail"}))

    url: Text


class _InputAudio(Wire):
    data: Text
    format: AudioFormat


class _Url(Wire):
    url: Text


def _has_media(data_url: str) -> str:
    if _medium_said(data_url) is None:
        raise PydanticCustomError("no_media", "should be 'data:<type>;base64,<data>' of a sound, an image or a video")
    return data_url


def _medium_said(data_url: str) -> Medium | None:
    """By the type that a data URL says."""
    said = data_url[:12].lower().removeprefix("data:")
    return next((medium for medium in _MEDIA if said.startswith(f"{medium}/")), None)


class _File(Wire):
    others = Others(
        ignored=frozenset({"filename"}),
        instead={"file_id": "no file is kept here; send its data as file_data"},
    )

    file_data: Annotated[
        Text, AfterValidator(_has_media), Field(json_schema_extra={"pattern": "^data:(audio|image|video)/"})
    ]


class _MediaPart(Wire):
    others = Others(ignored=OF_A_PART | {"uuid"})


class _ImagePart(_MediaPart):
    type: Literal["image_url"]
    image_url: _ImageUrl


class _PlainImagePart(_MediaPart):
    """As Qwen's own package writes it."""

    type: Literal["image"]
    image: Text


class _InputImagePart(_MediaPart):
    """As the API of responses has it."""

    others = Others(ignored=_MediaPart.others.ignored | {"detail"})

    type: Literal["input_image"]
    image_url: Text


class AudioPart(_MediaPart):
    """The only one that may hold base64 which is no data URL."""

    type: Literal["input_audio"]
    input_audio: _InputAudio


class _AudioUrlPart(_MediaPart):
    type: Literal["audio_url"]
    audio_url: _Url


class _PlainAudioPart(_MediaPart):
    """As Qwen's own package writes it."""

    type: Literal["audio"]
    audio: Text


class _VideoUrl(_Url):
    # vLLM-Omni's clients say by it how many frames the model is shown.
    num_frames: Annotated[int, Field(ge=1)] | None = None


class VideoUrlPart(_MediaPart):
    """A video file, of which the client may say how many frames the model is shown: of a second, or of the whole."""

    type: Literal["video_url"]
    video_url: _VideoUrl
    fps: _Fps | None = None

    @property
    def num_frames(self) -> int | None:
        return self.video_url.num_frames


class VideoPart(_MediaPart):
    """A video as Qwen's own package writes it, or as a list of pictures, which is DashScope's way."""

    type: Literal["video"]
    video: Annotated[
        Annotated[Text, Tag("#string")] | Annotated[list[Text], AfterValidator(not_blank), SOME, Tag("#list")],
        by_json_type("should be a string or a list of strings"),
    ]
    fps: _Fps | None = None


class _FilePart(_MediaPart):
    """A sound, an image or a video by the type that its data URL says."""

    type: Literal["file"]
    file: _File


def _part_type(part: object) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        return None
    return "#text" if kind in ("input_text", "output_text") else f"#{kind}"


MediaPart = (
    _ImagePart
    | _PlainImagePart
    | _InputImagePart
    | AudioPart
    | _AudioUrlPart
    | _PlainAudioPart
    | VideoUrlPart
    | VideoPart
    | _FilePart
)
_HELD: Mapping[str, tuple[Medium | None, str]] = {
    "image_url": ("image", "image_url.url"),
    "image": ("image", "image"),
    "input_image": ("image", "image_url"),
    "input_audio": ("audio", "input_audio.data"),
    "audio_url": ("audio", "audio_url.url"),
    "audio": ("audio", "audio"),
    "video_url": ("video", "video_url.url"),
    "video": ("video", "video"),
    "file": (None, "file.file_data"),
}
"""What a part of a type has, None where its data says it, and the path of the field that has it, or its URL."""

# A tag is part of pydantic's error path; the "#" tells it from the client's own keys, so that it can be taken out.
Part = Annotated[
    Annotated[TextPart, Tag("#text")]
    | Annotated[RefusalPart, Tag("#refusal")]
    | Annotated[_ImagePart, Tag("#image_url")]
    | Annotated[_PlainImagePart, Tag("#image")]
    | Annotated[_InputImagePart, Tag("#input_image")]
    | Annotated[AudioPart, Tag("#input_audio")]
    | Annotated[_AudioUrlPart, Tag("#audio_url")]
    | Annotated[_PlainAudioPart, Tag("#audio")]
    | Annotated[VideoUrlPart, Tag("#video_url")]
    | Annotated[VideoPart, Tag("#video")]
    | Annotated[_FilePart, Tag("#file")],
    Discriminator(
        _part_type,
        custom_error_type="part_type",
        custom_error_message="should be 'text', 'image_url', 'input_audio', 'audio_url', 'video_url', 'video' or "
        "'file'",
    ),
]


def medium_of(part: MediaPart) -> Medium:
    """What the part is, of a file by what its data says."""
    if isinstance(part, _FilePart):
        return _medium_said(part.file.file_data) or "image"
    return _HELD[part.type][0] or "image"


def media_sources(param: str, part: MediaPart) -> list[tuple[str, str]]:
    """The paths of the fields that hold the media or their URLs, and what they hold."""
    path = _HELD[part.type][1]
    held = attrgetter(path)(part)
    if isinstance(held, str):
        return [(f"{param}.{path}", held)]
    return [(f"{param}.{path}[{i}]", each) for i, each in enumerate(held)]
