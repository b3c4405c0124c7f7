"""`POST /v1/chat/completions`: the request as it is accepted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from omni_cluster.media import Video
from omni_cluster.openai_api.bodies import parsed
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.limits import ApiLimits
from omni_cluster.openai_api.messages import (
    MediaUrl,
    Message,
    MessageReader,
    TemplateMessage,
    check_messages,
    has_media,
    media_urls,
)
from omni_cluster.openai_api.openapi import request_body
from omni_cluster.openai_api.texts import check_text
from omni_cluster.openai_api.tools import Tool, template_tools
from omni_cluster.openai_api.wire import (
    SOME,
    FewKeys,
    KnownKeys,
    NamedVoice,
    StageSampling,
    Stop,
    Unsupported,
    Wire,
    at_most,
    check_model,
    check_voice,
    not_blank,
    voice_name,
    within,
)
from omni_cluster.sampling import BOUNDS

AnswerFormat = Literal["wav", "pcm16", "flac", "mp3", "opus", "aac"]
FinishReason = Literal["stop", "length"]
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_MODALITIES = 8
MAX_STAGES = 64
"""Entries of sampling parameters; a configuration has few stages."""


@dataclass(frozen=True)
class TextSampling:
    """How the client wants text to be sampled; None leaves a value to the stage configuration.

    `logprobs`: how many of the likeliest tokens to tell beside each sampled one's; None tells nothing of any.
    """

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: tuple[str, ...] = ()
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None


@dataclass(frozen=True, eq=False)
class ChatRequest:
    """A checked request with its media decoded.

    `messages` and `tools` are ready for a chat template, messages as {"role", "content": [{"type": "text", "text"} |
    {"type": "image"} | {"type": "audio"} | {"type": "video"}]}; the n-th audio part is `audios[n]` (float32
    `[samples]`, mono, 16 kHz), the n-th image part `images[n]` (uint8 RGB
    `[H, W, 3]`), the n-th video part `videos[n]`.
    `voice` and `audio_format` are None when the client left them out; `seed` is for all stages.
    `stage_sampling` has an entry a stage, in the order of the configuration; it is empty when the client sent none.
    `named_sampling`: the same by the stage's name; a request has one of both at most.
    """

    model: str
    messages: tuple[TemplateMessage, ...]
    audios: tuple[npt.NDArray[np.float32], ...]
    images: tuple[npt.NDArray[np.uint8], ...]
    videos: tuple[Video, ...]
    tools: tuple[dict[str, Any], ...]
    wants_audio: bool
    voice: str | None
    audio_format: AnswerFormat | None
    stream: bool
    include_usage: bool
    sampling: TextSampling
    seed: int | None
    stage_sampling: tuple[StageSampling | None, ...] = ()
    named_sampling: Mapping[str, StageSampling] = field(default_factory=dict)

    def without_media(self) -> ChatRequest:
        """For what lasts as long as the answer: a video's frames are a hundred megabytes."""
        return replace(self, audios=(), images=(), videos=())


def _only_one(value: int | None) -> int | None:
    if value in (None, 1):
        return value
    raise PydanticCustomError("only_one", "should be 1: a request gets one answer")


def _plain_text(value: object) -> object:
    if value is None or (isinstance(value, dict) and value.get("type") == "text"):
        return value
    raise PydanticCustomError("plain_text", "should be {'type': 'text'}: structured output is not supported")


_TEXT_FORMAT: dict[str, Any] = {
    "anyOf": [
        {"type": "null"},
        {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]},
    ]
}


def _left_to_model(value: object) -> object:
    if value in (None, "auto", "none"):
        return value
    raise PydanticCustomError("left_to_model", "should be 'auto' or 'none': no tool can be forced")


class _AnswerAudio(Wire):
    voice: NamedVoice | None = None
    format: AnswerFormat | None = None


class _StreamOptions(Wire):
    include_usage: bool | None = None


class _ProcessorOptions(KnownKeys):
    """vLLM's name for what is told to the model's processor."""

    use_audio_in_video: bool | None = None


class _Body(Wire):
    model: str
    messages: Annotated[list[Message], AfterValidator(not_blank), SOME, at_most(MAX_MESSAGES)]
    modalities: (
        Annotated[list[Literal["text", "audio"]], AfterValidator(not_blank), SOME, at_most(MAX_MODALITIES)] | None
    ) = None
    audio: _AnswerAudio | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: float | None = within(BOUNDS["temperature"])
    top_p: float | None = within(BOUNDS["top_p"])
    max_tokens: int | None = within(BOUNDS["max_tokens"])
    max_completion_tokens: int | None = within(BOUNDS["max_tokens"])
    frequency_penalty: float | None = within(BOUNDS["frequency_penalty"])
    presence_penalty: float | None = within(BOUNDS["presence_penalty"])
    seed: int | None = within(BOUNDS["seed"])
    stop: Stop | None = None
    min_tokens: int | None = within(BOUNDS["min_tokens"])
    ignore_eos: bool | None = None
    sampling_params_list: (
        Annotated[list[StageSampling | None], AfterValidator(not_blank), SOME, at_most(MAX_STAGES)] | None
    ) = None
    stage_sampling_params: Annotated[dict[str, StageSampling], FewKeys(MAX_STAGES)] | None = None
    n: Annotated[int | None, AfterValidator(_only_one), WithJsonSchema({"enum": [1, None]})] = None
    response_format: Annotated[Any, AfterValidator(_plain_text), WithJsonSchema(_TEXT_FORMAT)] = None
    tools: Annotated[list[Tool], at_most(MAX_TOOLS)] | None = None
    tool_choice: Annotated[Any, AfterValidator(_left_to_model), WithJsonSchema({"enum": [None, "auto", "none"]})] = None
    use_audio_in_video: bool | None = None
    mm_processor_kwargs: _ProcessorOptions | None = None
    functions: Unsupported = None
    function_call: Unsupported = None
    logprobs: bool | None = None
    top_logprobs: int | None = within(BOUNDS["logprobs"])
    logit_bias: Unsupported = None
    prediction: Unsupported = None
    web_search_options: Unsupported = None
    chat_template: Unsupported = None
    chat_template_kwargs: Unsupported = None


def chat_body(models: Collection[str]) -> dict[str, Any]:
    """What OpenAPI says of the request body."""
    return request_body(_Body, models)


@dataclass(frozen=True)
class CheckedChat:
    """A body that is accepted as far as it can be without its media; `urls`: what must be fetched for it."""

    wire: _Body
    voice: str | None
    modalities: Sequence[str]
    urls: tuple[MediaUrl, ...]

    @property
    def has_media(self) -> bool:
        return has_media(self.wire.messages)


def check_chat_request(
    body: bytes | bytearray, *, models: Collection[str], voices: Collection[str], limits: ApiLimits
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
    wire = parsed(_Body, body, limits.max_marks)
    check_model(wire.model, models)
    modalities = _modalities(wire)
    check_messages(wire.messages, limits, use_audio_in_video=_use_audio_in_video(wire))
    check_text(wire.messages, wire.tools or (), limits.max_text_chars)
    _include_usage(wire)
    _max_tokens(wire, limits)
    _logprobs(wire)
    _check_one_way_to_sample(wire)
    return CheckedChat(wire, _voice(wire, voices), modalities, media_urls(wire.messages))


def open_chat_request(checked: CheckedChat, fetched: Mapping[str, bytes], limits: ApiLimits) -> ChatRequest:
    """Decodes the media. Call it in a process of its own, which it may take down.

    `fetched`: what each of `checked.urls` led to, by its param. Raises BadRequest.
    """
    wire = checked.wire
    reader = MessageReader(wire.messages, limits, fetched, use_audio_in_video=_use_audio_in_video(wire))
    messages = tuple(reader.read(index, message) for index, message in enumerate(wire.messages))
    return ChatRequest(
        model=wire.model,
        messages=messages,
        audios=tuple(reader.audios),
        images=tuple(reader.images),
        videos=tuple(reader.videos),
        tools=template_tools(wire.tools or ()) if wire.tool_choice != "none" else (),
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
    voice = voice_name(wire.audio.voice) if wire.audio else None
    check_voice(voice, voices, "audio.voice")
    return voice


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
        logprobs=_logprobs(wire),
    )


def _logprobs(wire: _Body) -> int | None:
    if wire.top_logprobs is not None and not wire.logprobs:
        raise BadRequest(
            f"top_logprobs is {wire.top_logprobs}, but logprobs is not true; set it, or leave top_logprobs out.",
            param="top_logprobs",
            code="invalid_value",
        )
    return wire.top_logprobs or 0 if wire.logprobs else None


def _use_audio_in_video(wire: _Body) -> bool:
    """By the name that is vLLM's too, or by ours."""
    nested = wire.mm_processor_kwargs.use_audio_in_video if wire.mm_processor_kwargs else None
    if None not in (nested, wire.use_audio_in_video) and nested != wire.use_audio_in_video:
        raise BadRequest(
            "use_audio_in_video and mm_processor_kwargs.use_audio_in_video differ; send one of them.",
            param="use_audio_in_video",
            code="invalid_value",
        )
    return bool(nested or wire.use_audio_in_video)


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
