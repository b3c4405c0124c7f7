"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: the forms as they are accepted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, ConfigDict, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from omni_cluster.openai_api.budget import Budget
from omni_cluster.openai_api.errors import BadRequest, check_at_most, invalid, media_too_large
from omni_cluster.openai_api.fields import Others
from omni_cluster.openai_api.languages import language_name
from omni_cluster.openai_api.limits import ApiLimits
from omni_cluster.openai_api.media import SAMPLE_RATE_HZ, decode_audio
from omni_cluster.openai_api.multipart import FILE, FORM_TYPE, Part, parse_form, text_of
from omni_cluster.openai_api.openapi import request_body
from omni_cluster.openai_api.sound_formats import audio_format_of
from omni_cluster.openai_api.wire import Wire, at_most, named_model, refusal, within
from omni_cluster.types.sampling import BOUNDS

Task = Literal["transcribe", "translate"]
TranscriptFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
MAX_HINT_CHARS = 4096
DEFAULT_TARGET = "English"
"""OpenAI translates into nothing else."""
_HABITS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "request_id"),
        "stream_include_usage",  # vLLM's: the last event has it
    }
)
_ONE_SPEAKER = "speakers are not told apart; leave it out"
_INSTEAD = {
    "languages": "use language",
    "keywords": "use prompt",
    "known_speaker_names": _ONE_SPEAKER,
    "known_speaker_references": _ONE_SPEAKER,
    "max_tokens": "use max_completion_tokens",
}
_ONLY_WITH: Mapping[str, Sequence[TranscriptFormat]] = {
    "stream": ("json", "text"),
    "include": ("json",),
    "timestamp_granularities": ("verbose_json",),
}
# As in a chat; values of a form are strings.
_IDLE = {**{name: ("-1",) for name in ("max_completion_tokens", "seed")}, "language": ("auto", "Auto")}
_UNWANTED = frozenset({"null", "false", "0", "[]", "{}"})
"""How a form says of an option that it is not wanted, beside leaving it empty."""
_SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


@dataclass(frozen=True, eq=False)
class TranscriptionRequest:
    """A checked form with its sound decoded.

    `samples`: float32 `[n]`, mono, 16 kHz; they last `duration_s`. `language`: English name of what is spoken, None if
    the client named none; `into`: of the translation's, None for a transcription. `sampling`: by vLLM's names.
    """

    model: str
    samples: npt.NDArray[np.float32]
    duration_s: float
    language: str | None
    into: str | None
    hint: str
    format: TranscriptFormat
    stream: bool
    tells_logprobs: bool
    sampling: dict[str, Any]
    seed: int | None

    def without_sound(self) -> TranscriptionRequest:
        """For what lasts as long as the answer."""
        return replace(self, samples=self.samples[:0].copy())


def _segments_only(value: list[str] | None) -> list[str] | None:
    if value and "word" in value:
        raise PydanticCustomError("no_words", "should be ['segment']: the model tells no times of words")
    return value


def _automatic(value: str | None) -> str | None:
    if value in (None, "auto"):
        return value
    raise PydanticCustomError("automatic", "should be 'auto': audio is transcribed as a whole")


class _Fields(Wire):
    """Of both forms; all values of a form are strings."""

    model_config = ConfigDict(strict=False)
    others = Others(_HABITS, _IDLE, _INSTEAD)

    model: str | None = None
    prompt: Annotated[str, at_most(MAX_HINT_CHARS)] | None = None
    response_format: TranscriptFormat | None = None
    temperature: float | None = within(BOUNDS["temperature"])
    stream: bool | None = None
    top_p: float | None = within(BOUNDS["top_p"])
    top_k: int | None = within(BOUNDS["top_k"])
    min_p: float | None = within(BOUNDS["min_p"])
    repetition_penalty: float | None = within(BOUNDS["repetition_penalty"])
    frequency_penalty: float | None = within(BOUNDS["frequency_penalty"])
    presence_penalty: float | None = within(BOUNDS["presence_penalty"])
    seed: int | None = within(BOUNDS["seed"])
    max_completion_tokens: int | None = within(BOUNDS["max_tokens"])
    language: str | None = None
    include: list[Literal["logprobs"]] | None = None
    timestamp_granularities: (
        Annotated[
            list[Literal["word", "segment"]],
            AfterValidator(_segments_only),
            WithJsonSchema({"type": "array", "items": {"const": "segment"}}),
        ]
        | None
    ) = None
    chunking_strategy: Annotated[str | None, AfterValidator(_automatic), WithJsonSchema({"enum": ["auto", None]})] = (
        None
    )


class _Transcription(_Fields):
    """Words as they are spoken."""


class _Translation(_Fields):
    """`to_language`: vLLM's name."""

    to_language: str | None = None


_KINDS: Mapping[Task, type[_Fields]] = {"transcribe": _Transcription, "translate": _Translation}
_LISTS = frozenset({"include", "timestamp_granularities"})


def transcription_body(task: Task, models: Collection[str]) -> dict[str, Any]:
    """What OpenAPI says of the form."""
    made = request_body(_KINDS[task], models, FORM_TYPE)
    schema = made["requestBody"]["content"][FORM_TYPE]["schema"]
    schema["properties"][FILE] = {"type": "string", "format": "binary"}
    schema["required"] = [FILE]
    return made


def open_transcription(
    body: bytes, content_type: str, task: Task, *, models: Collection[str], limits: ApiLimits
) -> TranscriptionRequest:
    """Checks a form and decodes its file. Call it in a process of its own. Raises BadRequest that names the field."""
    parts = parse_form(body, content_type)
    wire = _checked([part for part in parts if part.name != FILE], task)
    model = named_model(wire.model, models)
    language = language_name(wire.language, "language") if wire.language is not None else None
    _check_format(wire)
    check_at_most("max_completion_tokens", wire.max_completion_tokens, limits.max_output_tokens)
    samples = _samples(parts, limits)
    return TranscriptionRequest(
        model=model,
        samples=samples,
        duration_s=samples.size / SAMPLE_RATE_HZ,
        language=language,
        into=_target(wire),
        hint=wire.prompt or "",
        format=wire.response_format or "json",
        stream=bool(wire.stream),
        tells_logprobs=bool(wire.include),
        sampling=_sampling(wire),
        seed=wire.seed,
    )


def _checked(parts: Sequence[Part], task: Task) -> _Fields:
    kind = _KINDS[task]
    values: dict[str, Any] = {}
    for part in parts:
        _gather(values, part)
    wanted = {
        name: value
        for name, value in values.items()
        if name in kind.model_fields or str(value).lower() not in _UNWANTED
    }
    try:
        return kind.model_validate(wanted)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)[0]) from None


def _gather(values: dict[str, Any], part: Part) -> None:
    """Adds a field, unless it is empty. Raises BadRequest for one that comes twice."""
    name = part.name.removesuffix("[]")
    if not part.data or name.partition("[")[0] in _HABITS:
        return
    if name in _LISTS:
        values.setdefault(name, []).append(text_of(part))
    elif name in values:
        raise _twice(name)
    else:
        values[name] = text_of(part)


def _twice(name: str) -> BadRequest:
    return invalid(name, f"The form has {name} twice; send it once.")


def _check_format(wire: _Fields) -> None:
    """Raises BadRequest for what goes with other formats only."""
    asked = wire.response_format or "json"
    for param, formats in _ONLY_WITH.items():
        if getattr(wire, param) and asked not in formats:
            raise invalid(
                param,
                f"{param} is only for response_format {' or '.join(map(repr, formats))}, but that is {asked!r}; leave "
                "one of them out.",
            )


def _target(wire: _Fields) -> str | None:
    if not isinstance(wire, _Translation):
        return None
    return DEFAULT_TARGET if wire.to_language is None else language_name(wire.to_language, "to_language")


def _sampling(wire: _Fields) -> dict[str, Any]:
    """The likeliest words unless the client asks for others, as in OpenAI's API."""
    given = {name: getattr(wire, name) for name in _SAMPLING if getattr(wire, name) is not None}
    if wire.max_completion_tokens is not None:
        given["max_tokens"] = wire.max_completion_tokens
    if wire.include or wire.response_format == "verbose_json":
        given["logprobs"] = 0
    return given | {"temperature": wire.temperature or 0.0}


def _samples(parts: Sequence[Part], limits: ApiLimits) -> npt.NDArray[np.float32]:
    data = _file(parts, limits)
    samples = decode_audio(data, format=audio_format_of(data, FILE), max_s=limits.max_audio_s, param=FILE)
    Budget(limits.max_decoded_bytes).take(samples.nbytes, FILE)
    return samples


def _file(parts: Sequence[Part], limits: ApiLimits) -> bytes:
    """Its name and its type are hints that nothing goes by. Raises BadRequest."""
    files = [part for part in parts if part.name == FILE]
    if not files:
        raise BadRequest(f"{FILE} is required.", param=FILE, code="missing_required_parameter")
    if len(files) > 1:
        raise _twice(FILE)
    data = files[0].data
    if not data:
        raise invalid(FILE, f"{FILE} is empty; send the sound in it.")
    if len(data) > limits.max_media_bytes or not limits.max_audio_parts:
        most = limits.max_media_bytes if limits.max_audio_parts else 0
        raise media_too_large(FILE, f"{FILE} has {len(data)} bytes, but at most {most} are accepted.")
    return data
