"""`POST /v1/audio/speech`: the request as it is accepted, and the events of its stream."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from omni_cluster.openai_api.bodies import parsed
from omni_cluster.openai_api.encoding import SoundFormat
from omni_cluster.openai_api.errors import BadRequest, invalid
from omni_cluster.openai_api.fields import Others
from omni_cluster.openai_api.limits import NO_DEFAULTS, ApiDefaults
from omni_cluster.openai_api.voices import chosen_voice
from omni_cluster.openai_api.wire import ANY_SEED, NamedVoice, Wire, named_model, not_blank, within
from omni_cluster.types.sampling import BOUNDS

MAX_INPUT_CHARS = 4096
"""OpenAI's."""
MAX_LANGUAGE_CHARS = 64
DEFAULT_FORMAT: SoundFormat = "mp3"


@dataclass(frozen=True)
class SpeechRequest:
    """A checked request. `stream_format`: None for one whole file.

    `voice`: None for the default one. `speaking`: how to speak; `ignored`: fields of the same kind that this model does
    not heed. `sample_rate_hz`: of the model's sound.
    """

    model: str
    text: str
    voice: str | None
    format: SoundFormat
    stream_format: Literal["sse", "audio"] | None
    seed: int | None
    speaking: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    sample_rate_hz: int = 0


_HABITS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "request_id"})
_IDLE: Mapping[str, tuple[Any, ...]] = {
    **ANY_SEED,
    "speed": (1,),
    "task_type": ("CustomVoice",),
    "volume": (1,),
    "pitch": (1,),
}
_ONE_VOICE = "the voices are the model's own, see /v1/audio/voices; leave it out"
_INSTEAD = {
    **dict.fromkeys(("ref_audio", "ref_text", "references", "voice_sample"), _ONE_VOICE),
    "format": "use response_format",
    "text": "use input",
}


class SpeechBody(Wire):
    """The request body."""

    others = Others(_HABITS, _IDLE, _INSTEAD)

    model: str | None = None
    input: Annotated[
        str, Field(max_length=MAX_INPUT_CHARS, json_schema_extra={"minLength": 1}), AfterValidator(not_blank)
    ]
    voice: NamedVoice | None = None
    # vLLM-Omni's and Qwen's name of voice.
    speaker: NamedVoice | None = None
    response_format: SoundFormat | None = None
    stream_format: Literal["sse", "audio"] | None = None
    stream: bool | None = None
    seed: int | None = within(BOUNDS["seed"])
    sample_rate: float | None = None
    instructions: Annotated[str, Field(max_length=MAX_INPUT_CHARS)] | None = None
    language: Annotated[str, Field(max_length=MAX_LANGUAGE_CHARS)] | None = None


def parse_speech_request(
    body: bytes | bytearray,
    *,
    models: Collection[str],
    voices: Collection[str],
    defaults: ApiDefaults = NO_DEFAULTS,
    max_codec_tokens: int = MAX_INPUT_CHARS,
) -> SpeechRequest:
    """Raises BadRequest with one sentence and the field's path."""
    wire = parsed(SpeechBody, body)
    model = named_model(wire.model, models)
    _check_can_be_spoken(wire.input, max_codec_tokens)
    _check_rate(wire.sample_rate, defaults.sample_rate_hz)
    asked = {"instructions": wire.instructions, "language": wire.language}
    given = {name: value for name, value in asked.items() if value is not None}
    return SpeechRequest(
        model,
        wire.input,
        chosen_voice({"voice": wire.voice, "speaker": wire.speaker}, voices, defaults.voice_aliases),
        wire.response_format or DEFAULT_FORMAT,
        wire.stream_format or ("audio" if wire.stream else None),
        wire.seed,
        {name: value for name, value in given.items() if name in defaults.speaking},
        tuple(name for name in given if name not in defaults.speaking),
        defaults.sample_rate_hz,
    )


def _check_rate(asked: float | None, sample_rate_hz: int) -> None:
    if asked not in (None, sample_rate_hz):
        raise BadRequest(
            f"sample_rate is {asked:g}, which is not supported; leave it out or send {sample_rate_hz}.",
            param="sample_rate",
            code="unsupported_parameter",
        )


def _check_can_be_spoken(text: str, max_codec_tokens: int) -> None:
    """Raises BadRequest for a text that would surely break off: each character takes a codec token at least."""
    if len(text) > max_codec_tokens:
        raise invalid(
            "input",
            f"input has {len(text)} characters, but at most {max_codec_tokens} can be spoken, the codec tokens that a "
            "request may take; send it in parts.",
        )


def delta_event(sound: bytes) -> dict[str, Any]:
    """A piece of the sound, in the encoding of the request."""
    return {"type": "speech.audio.delta", "audio": base64.b64encode(sound).decode("ascii")}


def done_event(input_tokens: int, output_tokens: int, finish_reason: str) -> dict[str, Any]:
    """The end; `output_tokens` are codec tokens. `finish_reason`: "length" where the sound breaks off at its limit."""
    usage = {"input_tokens": input_tokens, "output_tokens": output_tokens, "total_tokens": input_tokens + output_tokens}
    return {"type": "speech.audio.done", "usage": usage, "finish_reason": finish_reason}
