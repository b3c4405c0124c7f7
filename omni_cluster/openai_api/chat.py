"""`POST /v1/chat/completions`: the request as it is accepted, and the answers as they are sent."""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.media import AudioFormat, audio_format_of, decode_audio, decode_base64, decode_image

AnswerFormat = Literal["wav", "pcm16", "flac", "mp3", "opus"]
FinishReason = Literal["stop", "length"]
TemplateMessage = dict[str, Any]

_MAX_STOPS = 4
_SHOWN_CHARS = 60


@dataclass(frozen=True)
class ApiLimits:
    """What one request may ask for; bytes, seconds and pixels are those of one media part."""

    max_body_bytes: int
    max_audio_parts: int
    max_image_parts: int
    max_media_bytes: int
    max_audio_s: float
    max_image_pixels: int
    max_output_tokens: int


@dataclass(frozen=True)
class TextSampling:
    """How the client wants text to be sampled; None leaves a value to the stage configuration."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: tuple[str, ...] = ()
    min_tokens: int | None = None
    ignore_eos: bool | None = None


@dataclass(frozen=True, eq=False)
class ChatRequest:
    """A checked request with its media decoded.

    `messages` are ready for a chat template: {"role", "content": [{"type": "text", "text"} | {"type": "image"} |
    {"type": "audio"}]}; the n-th audio part is `audios[n]` (float32 `[samples]`, mono, 16 kHz), the n-th image part
    `images[n]` (RGB). `voice` and `audio_format` are None when the client left them out; `seed` is for all stages.
    `stage_sampling` has an entry a stage, in the order of the configuration; it is empty when the client sent none.
    `named_sampling`: the same by the stage's name; a request has one of both at most.
    """

    model: str
    messages: tuple[TemplateMessage, ...]
    audios: tuple[npt.NDArray[np.float32], ...]
    images: tuple[Image.Image, ...]
    wants_audio: bool
    voice: str | None
    audio_format: AnswerFormat | None
    stream: bool
    include_usage: bool
    sampling: TextSampling
    seed: int | None
    stage_sampling: tuple[StageSampling | None, ...] = ()
    named_sampling: Mapping[str, StageSampling] = field(default_factory=dict)


class Wire(BaseModel):
    """What a body and its parts are checked by: strict types, unknown fields ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)


def unsupported(value: object) -> object:
    if value in (None, False, [], {}, 0, "none", "auto"):
        return None
    raise PydanticCustomError("unsupported", "is not supported; leave it out")


def _only_one(value: int | None) -> int | None:
    if value in (None, 1):
        return value
    raise PydanticCustomError("only_one", "should be 1: a request gets one answer")


def _plain_text(value: object) -> object:
    if value is None or (isinstance(value, dict) and value.get("type") == "text"):
        return value
    raise PydanticCustomError("plain_text", "should be {'type': 'text'}: structured output is not supported")


def not_blank(value: Any) -> Any:
    if not value:
        raise PydanticCustomError("blank", "should not be empty")
    return value


def _few(stops: list[str]) -> list[str]:
    if len(stops) > _MAX_STOPS:
        raise PydanticCustomError("few", f"should have at most {_MAX_STOPS} strings")
    return stops


_Unsupported = Annotated[Any, AfterValidator(unsupported)]
_Text = Annotated[str, AfterValidator(not_blank)]


class _TextPart(Wire):
    type: Literal["text"]
    text: str


class _ImageUrl(Wire):
    url: _Text


class _ImagePart(Wire):
    type: Literal["image_url"]
    image_url: _ImageUrl


class _InputAudio(Wire):
    data: _Text
    format: AudioFormat


class _AudioPart(Wire):
    type: Literal["input_audio"]
    input_audio: _InputAudio


class _AudioUrl(Wire):
    url: _Text


class _AudioUrlPart(Wire):
    type: Literal["audio_url"]
    audio_url: _AudioUrl


def _part_type(part: object) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return f"#{kind}" if isinstance(kind, str) else None


def _string_or_list(value: object) -> str | None:
    if isinstance(value, str):
        return "#string"
    return "#list" if isinstance(value, list) else None


_MediaPart = _ImagePart | _AudioPart | _AudioUrlPart

# A tag is part of pydantic's error path; the "#" tells it from the client's own keys, so that it can be taken out.
_Part = Annotated[
    Annotated[_TextPart, Tag("#text")]
    | Annotated[_ImagePart, Tag("#image_url")]
    | Annotated[_AudioPart, Tag("#input_audio")]
    | Annotated[_AudioUrlPart, Tag("#audio_url")],
    Discriminator(
        _part_type,
        custom_error_type="part_type",
        custom_error_message="should be 'text', 'image_url', 'input_audio' or 'audio_url'",
    ),
]
_Content = Annotated[
    Annotated[str, Tag("#string")] | Annotated[list[_Part], AfterValidator(not_blank), Tag("#list")],
    Discriminator(
        _string_or_list,
        custom_error_type="string_or_list",
        custom_error_message="should be a string or a list of content parts",
    ),
]
_Stop = Annotated[
    Annotated[_Text, Tag("#string")] | Annotated[list[_Text], AfterValidator(_few), Tag("#list")],
    Discriminator(
        _string_or_list,
        custom_error_type="string_or_list",
        custom_error_message="should be a string or a list of strings",
    ),
]


_INT32_MAX = 2**31 - 1
_TokenId = Annotated[int, Field(ge=0, le=_INT32_MAX)]
_SEED_MAX = 2**63 - 1


class StageSampling(Wire):
    """How one stage is to sample, in vLLM's names; None leaves a value to the stage configuration."""

    model_config = ConfigDict(extra="forbid")

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=_INT32_MAX)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None
    seed: int | None = Field(default=None, ge=-_SEED_MAX - 1, le=_SEED_MAX)
    stop: _Stop | None = None
    stop_token_ids: list[_TokenId] | None = None

    def given(self) -> dict[str, Any]:
        """The values that the client sent, as vLLM's sampling parameters."""
        return self.model_dump(exclude_none=True)


class _Message(Wire):
    role: Literal["system", "user", "assistant"]
    # OpenAI's clients may name an earlier spoken answer by its id instead of giving content; no answer is kept here.
    audio: _Unsupported = None
    content: _Content
    tool_calls: _Unsupported = None
    function_call: _Unsupported = None


class _AnswerAudio(Wire):
    voice: str | None = None
    format: AnswerFormat | None = None


class _StreamOptions(Wire):
    include_usage: bool | None = None


class _Body(Wire):
    model: str
    messages: Annotated[list[_Message], AfterValidator(not_blank)]
    modalities: Annotated[list[Literal["text", "audio"]], AfterValidator(not_blank)] | None = None
    audio: _AnswerAudio | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-_SEED_MAX - 1, le=_SEED_MAX)
    stop: _Stop | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None
    sampling_params_list: Annotated[list[StageSampling | None], AfterValidator(not_blank)] | None = None
    stage_sampling_params: dict[str, StageSampling] | None = None
    n: Annotated[int | None, AfterValidator(_only_one)] = None
    response_format: Annotated[Any, AfterValidator(_plain_text)] = None
    tools: _Unsupported = None
    tool_choice: _Unsupported = None
    functions: _Unsupported = None
    function_call: _Unsupported = None
    logprobs: _Unsupported = None
    top_logprobs: _Unsupported = None
    logit_bias: _Unsupported = None
    prediction: _Unsupported = None
    web_search_options: _Unsupported = None
    chat_template: _Unsupported = None
    chat_template_kwargs: _Unsupported = None


@dataclass(frozen=True)
class MediaUrl:
    """An http(s) URL in a request, to be fetched, and the path of the field that holds it."""

    param: str
    url: str


@dataclass(frozen=True)
class CheckedChat:
    """A body that is accepted as far as it can be without its media; `urls`: what must be fetched for it."""

    wire: _Body
    voice: str | None
    modalities: Sequence[str]
    urls: tuple[MediaUrl, ...]


def check_chat_request(
    body: bytes, *, models: Collection[str], voices: Collection[str], limits: ApiLimits
) -> CheckedChat:
    """Checks all of a request body but what its media hold. Raises BadRequest with one sentence and the field's path.

    `audio` without `modalities` asks for text and audio.
    """
    if len(body) > limits.max_body_bytes:
        raise BadRequest(
            f"The request body has {len(body)} bytes, but at most {limits.max_body_bytes} are accepted.",
            code="request_too_large",
            status=413,
        )
    wire = _validated(body)
    check_model(wire.model, models)
    modalities = _modalities(wire)
    _check_media(wire, limits)
    _include_usage(wire)
    _max_tokens(wire, limits)
    _check_one_way_to_sample(wire)
    return CheckedChat(wire, _voice(wire, voices), modalities, tuple(_media_urls(wire)))


def open_chat_request(checked: CheckedChat, fetched: Mapping[str, bytes], limits: ApiLimits) -> ChatRequest:
    """Decodes the media, which takes as long as it takes: call it off the event loop.

    `fetched`: what each of `checked.urls` led to, by its param. Raises BadRequest.
    """
    wire = checked.wire
    reader = _MessageReader(limits, fetched)
    messages = tuple(reader.read(index, message) for index, message in enumerate(wire.messages))
    return ChatRequest(
        model=wire.model,
        messages=messages,
        audios=tuple(reader.audios),
        images=tuple(reader.images),
        wants_audio="audio" in checked.modalities,
        voice=checked.voice,
        audio_format=wire.audio.format if wire.audio else None,
        stream=bool(wire.stream),
        include_usage=_include_usage(wire),
        sampling=_sampling(wire, limits),
        seed=wire.seed,
        stage_sampling=tuple(wire.sampling_params_list or ()),
        named_sampling=wire.stage_sampling_params or {},
    )


def _media_parts(wire: _Body) -> Iterator[tuple[str, str, _MediaPart]]:
    """Path, role and part of each media part."""
    for index, message in enumerate(wire.messages):
        if isinstance(message.content, str):
            continue
        for i, part in enumerate(message.content):
            if not isinstance(part, _TextPart):
                yield f"messages[{index}].content[{i}]", message.role, part


def _check_media(wire: _Body, limits: ApiLimits) -> None:
    """Raises BadRequest for media where there may be none, or for too many: before any is fetched or decoded."""
    images = audios = 0
    for param, role, part in _media_parts(wire):
        if role != "user":
            raise BadRequest(
                f"{param} is {part.type} in a message of the {role}, but only user messages may hold media.",
                param=param,
                code="invalid_value",
            )
        if isinstance(part, _ImagePart):
            images += 1
            _check_room("images", images, limits.max_image_parts, _source(param, part)[0])
        else:
            audios += 1
            _check_room("audio inputs", audios, limits.max_audio_parts, _source(param, part)[0])


def _media_urls(wire: _Body) -> Iterator[MediaUrl]:
    for param, _, part in _media_parts(wire):
        name, value = _source(param, part)
        if _is_url(value):
            yield MediaUrl(name, value)


def _source(param: str, part: _MediaPart) -> tuple[str, str]:
    """The path of the field that holds the media or their URL, and what it holds."""
    if isinstance(part, _ImagePart):
        return f"{param}.image_url.url", part.image_url.url
    if isinstance(part, _AudioUrlPart):
        return f"{param}.audio_url.url", part.audio_url.url
    return f"{param}.input_audio.data", part.input_audio.data


def _is_url(value: str) -> bool:
    return value[:8].lower().startswith(("http://", "https://"))


def _validated(body: bytes) -> _Body:
    try:
        return _Body.model_validate_json(body)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)[0]) from None


def refusal(fault: ErrorDetails) -> BadRequest:
    kind, message, value = fault["type"], fault["msg"], fault["input"]
    if kind == "json_invalid":
        return BadRequest("The request body is not valid JSON in UTF-8; send one JSON object.", code="invalid_json")
    param = _path(fault["loc"])
    if kind == "part_type":
        param, value = f"{param}.type", value.get("type") if isinstance(value, dict) else None
    name = param or "The request body"
    if kind == "missing":
        return BadRequest(f"{name} is required.", param=param, code="missing_required_parameter")
    if kind == "unsupported":
        return BadRequest(f"{name} {message}.", param=param, code="unsupported_parameter")
    if kind == "extra_forbidden":
        known = ", ".join(StageSampling.model_fields)
        return BadRequest(f"{name} is no sampling parameter; use {known}.", param=param, code="unsupported_parameter")
    wish = message.removeprefix("Input ")
    return BadRequest(f"{name} is {_shown(value)}, but it {wish}.", param=param, code="invalid_value")


def _path(loc: Sequence[int | str]) -> str | None:
    keys = [key for key in loc if not (isinstance(key, str) and key.startswith("#"))]
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return path.removeprefix(".") or None


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=lambda _: "...")
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def check_model(model: str, models: Collection[str]) -> None:
    if model not in models:
        raise BadRequest(
            f"The model {_shown(model)} does not exist; use one of {', '.join(sorted(models))}.",
            param="model",
            code="model_not_found",
            status=404,
        )


def _modalities(wire: _Body) -> Sequence[str]:
    if wire.modalities is None:
        return ("text", "audio") if wire.audio else ("text",)
    if "text" not in wire.modalities:
        raise BadRequest(
            "modalities asks for audio without text, which is not supported; use ['text'] or ['text', 'audio'].",
            param="modalities",
            code="invalid_value",
        )
    return wire.modalities


def _voice(wire: _Body, voices: Collection[str]) -> str | None:
    voice = wire.audio.voice if wire.audio else None
    check_voice(voice, voices, "audio.voice")
    return voice


def check_voice(voice: str | None, voices: Collection[str], param: str) -> None:
    """Raises BadRequest for a voice that the model lacks; None is the default one."""
    if voice is not None and voice not in voices:
        raise BadRequest(
            f"{param} is {_shown(voice)}, but the voices are {', '.join(sorted(voices))}.",
            param=param,
            code="invalid_value",
        )


def _include_usage(wire: _Body) -> bool:
    if wire.stream_options and not wire.stream:
        raise BadRequest(
            "stream_options is only for streams; leave it out or set stream to true.",
            param="stream_options",
            code="invalid_value",
        )
    return bool(wire.stream_options and wire.stream_options.include_usage)


def _check_one_way_to_sample(wire: _Body) -> None:
    if wire.sampling_params_list and wire.stage_sampling_params:
        raise BadRequest(
            "stage_sampling_params and sampling_params_list are both given; send one of them.",
            param="stage_sampling_params",
            code="invalid_value",
        )


def _sampling(wire: _Body, limits: ApiLimits) -> TextSampling:
    return TextSampling(
        temperature=wire.temperature,
        top_p=wire.top_p,
        max_tokens=_max_tokens(wire, limits),
        frequency_penalty=wire.frequency_penalty,
        presence_penalty=wire.presence_penalty,
        stop=(wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop or ()),
        min_tokens=wire.min_tokens,
        ignore_eos=wire.ignore_eos,
    )


def _max_tokens(wire: _Body, limits: ApiLimits) -> int | None:
    """The newer name wins, as in OpenAI's API, where `max_tokens` is the deprecated one."""
    newer = wire.max_completion_tokens is not None
    param = "max_completion_tokens" if newer else "max_tokens"
    tokens = wire.max_completion_tokens if newer else wire.max_tokens
    if tokens is not None and tokens > limits.max_output_tokens:
        raise BadRequest(
            f"{param} is {tokens}, but at most {limits.max_output_tokens} are accepted.",
            param=param,
            code="invalid_value",
        )
    return tokens


class _MessageReader:
    """Turns messages into template form and gathers their media."""

    def __init__(self, limits: ApiLimits, fetched: Mapping[str, bytes]) -> None:
        self._limits = limits
        self._fetched = fetched
        self.audios: list[npt.NDArray[np.float32]] = []
        self.images: list[Image.Image] = []

    def read(self, index: int, message: _Message) -> TemplateMessage:
        content = message.content
        if isinstance(content, str):
            return {"role": message.role, "content": [{"type": "text", "text": content}]}
        param = f"messages[{index}].content"
        parts = [self._read_part(f"{param}[{i}]", part) for i, part in enumerate(content)]
        return {"role": message.role, "content": parts}

    def _read_part(self, param: str, part: _TextPart | _MediaPart) -> dict[str, str]:
        if isinstance(part, _TextPart):
            return {"type": "text", "text": part.text}
        name, value = _source(param, part)
        if isinstance(part, _ImagePart):
            data = self._data(name, value, must_be_url=True)
            self.images.append(decode_image(data, max_pixels=self._limits.max_image_pixels, param=name))
            return {"type": "image"}
        data = self._data(name, value, must_be_url=isinstance(part, _AudioUrlPart))
        kind = part.input_audio.format if isinstance(part, _AudioPart) else audio_format_of(data, name)
        self.audios.append(decode_audio(data, format=kind, max_s=self._limits.max_audio_s, param=name))
        return {"type": "audio"}

    def _data(self, param: str, value: str, *, must_be_url: bool) -> bytes:
        if _is_url(value):
            return self._fetched[param]
        if must_be_url and value[:5].lower() != "data:":
            raise BadRequest(
                f"{param} is {_shown(value)}, but it should be an http(s) URL or 'data:<type>;base64,<data>'.",
                param=param,
                code="invalid_value",
            )
        return decode_base64(value, self._limits.max_media_bytes, param)


def _check_room(what: str, count: int, most: int, param: str) -> None:
    if count > most:
        raise BadRequest(
            f"The request has more than {most} {what}, which is the most that is accepted.",
            param=param,
            code="too_many_media",
            status=413,
        )


@dataclass(frozen=True)
class Usage:
    """Tokens of a request; `completion_tokens` are those of the text, `audio_tokens` the codec tokens spoken."""

    prompt_tokens: int
    completion_tokens: int
    audio_tokens: int = 0

    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens_details": {"audio_tokens": self.audio_tokens},
        }


def new_answer_id() -> str:
    """A fresh id of one answer."""
    return f"chatcmpl-{uuid.uuid4().hex}"


class ChatStream:
    """The chunks of one streamed answer, in the order: start, text and audio, finish, usage.

    Text is in `delta.content` and, when audio is wanted, also in `delta.audio.transcript`. Nothing of an answer is kept
    after it was sent, so its audio expires at the moment it was created. `modality` beside `choices` is by what
    vLLM-Omni's clients, its benchmark among them, tell text from audio.
    """

    def __init__(self, request: ChatRequest, *, answer_id: str | None = None, created: int | None = None) -> None:
        self.id = answer_id or new_answer_id()
        self.created = int(time.time()) if created is None else created
        self._request = request

    def start(self) -> dict[str, Any]:
        """The first chunk, which names the role."""
        return self._chunk({"role": "assistant", "content": ""})

    def text(self, text: str) -> dict[str, Any]:
        """A piece of the text."""
        delta: dict[str, Any] = {"content": text}
        if self._request.wants_audio:
            delta["audio"] = {"id": _audio_id(self.id), "transcript": text}
        return self._chunk(delta) | {"modality": "text"}

    def audio(self, data: bytes) -> dict[str, Any]:
        """A piece of audio in the encoding of the request; cut raw PCM with `Base64Pieces` first."""
        delta = {"audio": {"id": _audio_id(self.id), "data": base64.b64encode(data).decode("ascii")}}
        return self._chunk(delta) | {"modality": "audio"}

    def finish(self, reason: FinishReason) -> dict[str, Any]:
        """The chunk that says why the answer ends."""
        delta: dict[str, Any] = {}
        if self._request.wants_audio:
            delta["audio"] = {"id": _audio_id(self.id), "expires_at": self.created}
        return self._chunk(delta, reason)

    def usage(self, usage: Usage) -> dict[str, Any] | None:
        """The last chunk, without choices; None when the client did not ask for it."""
        return self._head() | {"choices": [], "usage": usage.body()} if self._request.include_usage else None

    def _chunk(self, delta: dict[str, Any], reason: FinishReason | None = None) -> dict[str, Any]:
        chunk = self._head() | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}
        return chunk | {"usage": None} if self._request.include_usage else chunk

    def _head(self) -> dict[str, Any]:
        return _head(self.id, "chat.completion.chunk", self.created, self._request.model)


def completion(
    request: ChatRequest,
    *,
    text: str,
    audio: bytes | None,
    finish_reason: FinishReason,
    usage: Usage,
    answer_id: str | None = None,
    created: int | None = None,
) -> dict[str, Any]:
    """The body of an answer that is not streamed; `audio` is encoded as the request asked, None without audio.

    Unlike OpenAI's, `message.content` holds the text beside audio too, because clients of vLLM and DashScope read it
    there; the same text is the audio's transcript.
    """
    answer_id = answer_id or new_answer_id()
    created = int(time.time()) if created is None else created
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if audio is not None:
        data = base64.b64encode(audio).decode("ascii")
        message["audio"] = {"id": _audio_id(answer_id), "data": data, "expires_at": created, "transcript": text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
    return _head(answer_id, "chat.completion", created, request.model) | {"choices": [choice], "usage": usage.body()}


def _head(answer_id: str, kind: str, created: int, model: str) -> dict[str, Any]:
    return {"id": answer_id, "object": kind, "created": created, "model": model}


def _audio_id(answer_id: str) -> str:
    return f"audio-{answer_id.removeprefix('chatcmpl-')}"
