"""`POST /v1/chat/completions`: the request as it is accepted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field

from omni_cluster.openai_api.bodies import check_size, parsed, validated
from omni_cluster.openai_api.errors import check_at_most, invalid
from omni_cluster.openai_api.fields import Others
from omni_cluster.openai_api.limits import NO_DEFAULTS, ApiDefaults, ApiLimits
from omni_cluster.openai_api.messages import (
    MediaUrl,
    Message,
    MessageReader,
    TemplateMessage,
    check_messages,
    has_media,
    media_urls,
)
from omni_cluster.openai_api.structured import (
    Choices,
    ResponseFormat,
    Schema,
    Structure,
    StructuredOutputs,
    structure_of,
)
from omni_cluster.openai_api.tools import Tool, ToolChoice, tool_use_of
from omni_cluster.openai_api.voices import chosen_voice
from omni_cluster.openai_api.wire import (
    ANY,
    SOME,
    FewKeys,
    NamedVoice,
    Sampling,
    StageSampling,
    Wire,
    at_most,
    named_model,
    not_blank,
    within,
)
from omni_cluster.types.media import Video
from omni_cluster.types.modalities import Modality
from omni_cluster.types.sampling import BOUNDS
from omni_cluster.types.tool_use import ToolUse

AnswerFormat = Literal["wav", "pcm16", "flac", "mp3", "opus", "aac"]
FinishReason = Literal["stop", "length", "tool_calls"]
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_MODALITIES = 8
MAX_STAGES = 64
"""Entries of sampling parameters; a configuration has few stages."""


@dataclass(frozen=True, eq=False)
class ChatRequest:
    """A checked request with its media decoded.

    `messages` and `tools` are ready for a chat template, messages as {"role", "content": [{"type": "text", "text"} |
    {"type": "image"} | {"type": "audio"} | {"type": "video"}]}; the n-th audio part is `audios[n]` (float32
    `[samples]`, mono, 16 kHz), the n-th image part `images[n]` (uint8 RGB
    `[H, W, 3]`), the n-th video part `videos[n]`.
    `voice` and `audio_format` are None when the client left them out; `seed` is for all stages.
    `sampling`: of the text, what the client asked for, by vLLM's names; `logprobs` is how many of the likeliest tokens
    are given beside each sampled one.
    `stage_sampling` has an entry a stage, in the order of the configuration; it is empty when the client sent none.
    `named_sampling`: the same by the stage's name; a request has one of both at most.
    `choices`: how many answers. `usage_in_chunks`: every chunk of a stream says the tokens so far.
    `structure`: what the text must be; None for any. `tool_use`: what the answer may call, of `tools`.
    """

    model: str
    messages: tuple[TemplateMessage, ...]
    audios: tuple[npt.NDArray[np.float32], ...]
    images: tuple[npt.NDArray[np.uint8], ...]
    videos: tuple[Video, ...]
    tools: tuple[Mapping[str, Any], ...]
    wants_audio: bool
    voice: str | None
    audio_format: AnswerFormat | None
    stream: bool
    include_usage: bool
    sampling: dict[str, Any]
    seed: int | None
    stage_sampling: tuple[StageSampling | None, ...] = ()
    named_sampling: Mapping[str, StageSampling] = field(default_factory=dict)
    choices: int = 1
    usage_in_chunks: bool = False
    structure: Structure | None = None
    tool_use: ToolUse | None = None
    wants_images: bool = False

    def without_media(self) -> ChatRequest:
        """For what lasts as long as the answer: a video's frames are a hundred megabytes."""
        return replace(self, audios=(), images=(), videos=())


class _AnswerAudio(Wire):
    voice: NamedVoice | None = None
    format: AnswerFormat | None = None


class _StreamOptions(Wire):
    # OpenAI's events carry letters of padding unless it is false; ours never do.
    others = Others(ignored=frozenset({"include_obfuscation"}))

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _TemplateOptions(Wire):
    """vLLM's name for options of the chat template; none here has any."""


class _ProcessorOptions(Wire):
    """vLLM's name for options of the model's processor."""

    use_audio_in_video: bool | None = None


_HABITS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "request_id", "session_id"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("include_reasoning", "separate_reasoning", "stream_reasoning", "watermarking"),
        "return_stage_metrics",
    }
)
_IDLE = {
    **ANY,
    **dict.fromkeys(("function_call", "reasoning_effort"), ("none", "auto")),
    "add_generation_prompt": (True,),
    **dict.fromkeys(("best_of", "length_penalty"), (1,)),
    **dict.fromkeys(("truncate_prompt_tokens", "thinking_token_budget"), (-1,)),
    "verbosity": ("medium",),
}
_AS_A_PART = "send each in a content part of type {}, in its place among the text"
_INSTEAD = {
    "images": _AS_A_PART.format("image_url"),
    "audios": _AS_A_PART.format("input_audio or audio_url"),
    "videos": _AS_A_PART.format("video_url"),
    "voice": "use audio.voice",
    "response_modalities": "use modalities",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "documents": "write them into a message",
    "chat_template": "the checkpoint's own one is used; leave it out",
    "prompt": "use messages, or /v1/completions",
    "extra_body": "its fields belong into the body itself",
}


class ChatBody(Sampling):
    """The request body."""

    others = Others(_HABITS, _IDLE, _INSTEAD)
    # `audio: {}` asks for sound in the default voice.
    kept: ClassVar[Mapping[str, tuple[type, ...]]] = {"audio": (dict,)}

    model: str | None = None
    messages: Annotated[list[Message], AfterValidator(not_blank), SOME, at_most(MAX_MESSAGES)]
    modalities: Annotated[list[Modality], at_most(MAX_MODALITIES)] | None = None
    audio: _AnswerAudio | None = None
    # vLLM-Omni's and Qwen's name of audio.voice.
    speaker: NamedVoice | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_completion_tokens: int | None = within(BOUNDS["max_tokens"])
    sampling_params_list: Annotated[list[StageSampling | None], at_most(MAX_STAGES)] | None = None
    stage_sampling_params: Annotated[dict[str, StageSampling | None], FewKeys(MAX_STAGES)] | None = None
    # SGLang-Omni's name of it.
    stage_sampling: Annotated[dict[str, StageSampling | None], FewKeys(MAX_STAGES)] | None = None
    n: int | None = Field(default=None, ge=1)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    tools: Annotated[list[Tool], at_most(MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    use_audio_in_video: bool | None = None
    mm_processor_kwargs: _ProcessorOptions | None = None
    chat_template_kwargs: _TemplateOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = within(BOUNDS["logprobs"])


@dataclass(frozen=True)
class CheckedChat:
    """A body that is accepted as far as it can be without its media; `urls`: what must be fetched for it."""

    wire: ChatBody
    model: str
    voice: str | None
    modalities: Sequence[str]
    urls: tuple[MediaUrl, ...]
    structure: Structure | None = None
    tool_use: ToolUse | None = None

    @property
    def has_media(self) -> bool:
        return has_media(self.wire.messages)


def check_chat_request(
    body: bytes | bytearray,
    *,
    models: Collection[str],
    voices: Collection[str],
    limits: ApiLimits,
    defaults: ApiDefaults = NO_DEFAULTS,
) -> CheckedChat:
    """Checks all of a request body but what its media hold. Raises BadRequest with one sentence and the field's path.

    `audio` or `speaker` without `modalities` asks for text and audio.
    """
    check_size(body, limits.max_body_bytes)
    return _checked(parsed(ChatBody, body, limits.max_marks), models, voices, limits, defaults)


def check_translated(chat: Mapping[str, Any], *, models: Collection[str], limits: ApiLimits) -> CheckedChat:
    """As `check_chat_request`, of what another endpoint's request was turned into; it asks for no voice."""
    return _checked(validated(ChatBody, chat), models, (), limits, NO_DEFAULTS)


def _checked(
    wire: ChatBody, models: Collection[str], voices: Collection[str], limits: ApiLimits, defaults: ApiDefaults
) -> CheckedChat:
    model = named_model(wire.model, models)
    modalities = _modalities(wire, defaults)
    check_messages(wire.messages, wire.tools or (), limits, use_audio_in_video=_use_audio_in_video(wire))
    _include_usage(wire)
    _max_tokens(wire, limits)
    _logprobs(wire)
    _check_one_way_to_sample(wire)
    check_at_most("n", wire.n, limits.max_choices)
    named = {"audio.voice": wire.audio.voice if wire.audio else None, "speaker": wire.speaker}
    voice = chosen_voice(named, voices, defaults.voice_aliases)
    structure = _structure(wire)
    tool_use = tool_use_of(wire.tools or (), wire.tool_choice, wire.parallel_tool_calls, structure)
    return CheckedChat(wire, model, voice, modalities, media_urls(wire.messages), structure, tool_use)


def open_chat_request(checked: CheckedChat, fetched: Mapping[str, bytes], limits: ApiLimits) -> ChatRequest:
    """Decodes the media. Call it in a process of its own, which it may take down.

    `fetched`: what each of `checked.urls` led to, by its param. Raises BadRequest.
    """
    wire = checked.wire
    reader = MessageReader(wire.messages, limits, fetched, use_audio_in_video=_use_audio_in_video(wire))
    messages = tuple(reader.read(index, message) for index, message in enumerate(wire.messages))
    return ChatRequest(
        model=checked.model,
        messages=messages,
        audios=tuple(reader.audios),
        images=tuple(reader.images),
        videos=tuple(reader.videos),
        tools=checked.tool_use.tools if checked.tool_use is not None else (),
        wants_audio="audio" in checked.modalities,
        voice=checked.voice,
        audio_format=wire.audio.format if wire.audio else None,
        stream=bool(wire.stream),
        include_usage=_include_usage(wire),
        sampling=_sampling(wire, limits),
        seed=wire.seed,
        stage_sampling=tuple(wire.sampling_params_list or ()),
        named_sampling={name: entry for name, entry in _by_name(wire).items() if entry is not None},
        choices=wire.n or 1,
        usage_in_chunks=bool(wire.stream_options and wire.stream_options.continuous_usage_stats),
        structure=checked.structure,
        tool_use=checked.tool_use,
        wants_images="image" in checked.modalities,
    )


def _modalities(wire: ChatBody, defaults: ApiDefaults) -> Sequence[str]:
    """Sound and pictures always come with the text, as OpenAI's sound has a transcript."""
    if wire.modalities is None:
        return ("text", "audio") if wire.audio or wire.speaker else defaults.modalities
    return wire.modalities


def _include_usage(wire: ChatBody) -> bool:
    options = wire.stream_options
    if options and (options.include_usage or options.continuous_usage_stats) and not wire.stream:
        raise invalid("stream_options", "stream_options is only for streams; leave it out or set stream to true.")
    return bool(options and options.include_usage)


def _by_name(wire: ChatBody) -> Mapping[str, StageSampling | None]:
    return wire.stage_sampling_params or wire.stage_sampling or {}


def _check_one_way_to_sample(wire: ChatBody) -> None:
    ways = ("stage_sampling_params", "stage_sampling", "sampling_params_list")
    first, *others = [name for name in ways if getattr(wire, name)] or [""]
    if others:
        raise invalid(first, f"{first} and {others[0]} are both given; send one of them.")


def _structure(wire: ChatBody) -> Structure | None:
    """Raises BadRequest for one that cannot be kept."""
    guided = {
        "json": wire.guided_json,
        "regex": wire.guided_regex,
        "choice": wire.guided_choice,
        "grammar": wire.guided_grammar,
    }
    return structure_of(wire.response_format, wire.structured_outputs, guided)


def _sampling(wire: ChatBody, limits: ApiLimits) -> dict[str, Any]:
    asked = wire.given() | {"seed": None, "max_tokens": _max_tokens(wire, limits), "logprobs": _logprobs(wire)}
    return {name: value for name, value in asked.items() if value is not None}


def _logprobs(wire: ChatBody) -> int | None:
    if wire.top_logprobs and not wire.logprobs:
        raise invalid(
            "top_logprobs",
            f"top_logprobs is {wire.top_logprobs}, but logprobs is not true; set it, or leave top_logprobs out.",
        )
    return wire.top_logprobs or 0 if wire.logprobs else None


def _use_audio_in_video(wire: ChatBody) -> bool:
    """By the name that is vLLM's too, or by ours."""
    nested = wire.mm_processor_kwargs.use_audio_in_video if wire.mm_processor_kwargs else None
    if None not in (nested, wire.use_audio_in_video) and nested != wire.use_audio_in_video:
        raise invalid(
            "use_audio_in_video",
            "use_audio_in_video and mm_processor_kwargs.use_audio_in_video differ; send one of them.",
        )
    return bool(nested or wire.use_audio_in_video)


def _max_tokens(wire: ChatBody, limits: ApiLimits) -> int | None:
    """The newer name wins, as in OpenAI's API, where `max_tokens` is the deprecated one."""
    newer = wire.max_completion_tokens is not None
    param = "max_completion_tokens" if newer else "max_tokens"
    tokens = wire.max_completion_tokens if newer else wire.max_tokens
    check_at_most(param, tokens, limits.max_output_tokens)
    return tokens
