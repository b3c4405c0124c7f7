"""`POST /v1/audio/speech`: the request as it is accepted, and the events of its stream."""

from __future__ import annotations

import base64
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from omni_cluster.openai_api.bodies import parsed
from omni_cluster.openai_api.encoding import SoundFormat
from omni_cluster.openai_api.openapi import request_body
from omni_cluster.openai_api.wire import (
    NamedVoice,
    Unsupported,
    Wire,
    check_model,
    check_voice,
    not_blank,
    voice_name,
)

MAX_INPUT_CHARS = 4096
"""OpenAI's."""
DEFAULT_FORMAT: SoundFormat = "mp3"


@dataclass(frozen=True)
class SpeechRequest:
    """A checked request. `stream_format`: None for one whole file."""

    model: str
    text: str
    voice: str | None
    format: SoundFormat
    stream_format: Literal["sse", "audio"] | None
    seed: int | None


class _Body(Wire):
    model: str
    input: Annotated[
        str, Field(max_length=MAX_INPUT_CHARS, json_schema_extra={"minLength": 1}), AfterValidator(not_blank)
    ]
    voice: NamedVoice | None = None
    response_format: SoundFormat | None = None
    speed: Annotated[float | None, Field(ge=1, le=1)] = None
    stream_format: Literal["sse", "audio"] | None = None
    seed: int | None = Field(default=None, ge=0, le=2**31 - 1)
    instructions: Unsupported = None


def speech_body(models: Collection[str]) -> dict[str, Any]:
    """What OpenAPI says of the request body."""
    return request_body(_Body, models)


def parse_speech_request(body: bytes | bytearray, *, models: Collection[str], voices: Collection[str]) -> SpeechRequest:
    """Raises BadRequest with one sentence and the field's path."""
    wire = parsed(_Body, body)
    check_model(wire.model, models)
    voice = voice_name(wire.voice)
    check_voice(voice, voices, "voice")
    return SpeechRequest(
        wire.model, wire.input, voice, wire.response_format or DEFAULT_FORMAT, wire.stream_format, wire.seed
    )


def delta_event(sound: bytes) -> dict[str, Any]:
    """A piece of the sound, in the encoding of the request."""
    return {"type": "speech.audio.delta", "audio": base64.b64encode(sound).decode("ascii")}


def done_event(input_tokens: int, output_tokens: int, finish_reason: str) -> dict[str, Any]:
    """The end; `output_tokens` are codec tokens. `finish_reason`: "length" where the sound breaks off at its limit."""
    usage = {"input_tokens": input_tokens, "output_tokens": output_tokens, "total_tokens": input_tokens + output_tokens}
    return {"type": "speech.audio.done", "usage": usage, "finish_reason": finish_reason}
