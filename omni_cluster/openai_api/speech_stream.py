"""The events that a client of `/v1/audio/speech/stream` sends, in vLLM-Omni's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from omni_cluster.openai_api.bodies import validated
from omni_cluster.openai_api.encoding import SoundFormat
from omni_cluster.openai_api.errors import BadRequest, invalid
from omni_cluster.openai_api.fields import is_nothing
from omni_cluster.openai_api.realtime.client_events import event_object
from omni_cluster.openai_api.sentences import Granularity
from omni_cluster.openai_api.wire import Wire, shown

MOST_EVENT_BYTES: Final = 131_072
"""vLLM-Omni's."""
DEFAULT_FORMAT: Final[SoundFormat] = "wav"
_INSTEAD: Final = {"input": "input.text", "stream": "stream_audio", "stream_format": "stream_audio"}


class InputText(Wire):
    """The next piece of the text."""

    type: Literal["input.text"]
    text: str


class InputDone(Wire):
    """The text is whole; another one may follow."""

    type: Literal["input.done"]


class CloseSession(Wire):
    """The session ends, once all of its text is spoken."""

    type: Literal["session.close"]


class _Own(Wire):
    """What a session's settings have beside the fields of a request for speech."""

    type: Literal["session.config"]
    stream_audio: bool | None = None
    split_granularity: Granularity | None = None


@dataclass(frozen=True)
class SessionConfig:
    """How to speak. `fields`: of the body of `/v1/audio/speech`, but its text."""

    fields: Mapping[str, Any]
    granularity: Granularity

    @property
    def format(self) -> str:
        return str(self.fields["response_format"])

    @property
    def streams(self) -> bool:
        return "stream_format" in self.fields

    def body(self, text: str) -> bytes:
        """A request for the speech of `text`."""
        return json.dumps({**self.fields, "input": text}).encode()


SpeechEvent = SessionConfig | InputText | InputDone | CloseSession
_KINDS: Final[Mapping[str, type[InputText | InputDone | CloseSession]]] = {
    "input.text": InputText,
    "input.done": InputDone,
    "session.close": CloseSession,
}


def speech_event(text: str, model: str) -> SpeechEvent:
    """`model`: of a session that names none. Raises BadRequest; values of a `SessionConfig` are checked as a body's."""
    event = event_object(text, MOST_EVENT_BYTES)
    kind = event.get("type")
    if kind == "session.config":
        return _config(event, model)
    if isinstance(kind, str) and kind in _KINDS:
        return validated(_KINDS[kind], event)
    raise invalid("type", f"type is {shown(kind)}, but the events of a client are session.config, {', '.join(_KINDS)}.")


def _config(event: Mapping[str, Any], model: str) -> SessionConfig:
    own = validated(_Own, {name: value for name, value in event.items() if name in _Own.model_fields})
    fields = {name: value for name, value in event.items() if name not in _Own.model_fields and not is_nothing(value)}
    for name, instead in _INSTEAD.items():
        if name in fields:
            sentence = f"{name} is {shown(fields[name])}, which is not supported in session.config; use {instead}."
            raise BadRequest(sentence, param=name, code="unsupported_parameter")
    fields = {"model": model, "response_format": DEFAULT_FORMAT, **fields}
    if own.stream_audio:
        fields["stream_format"] = "audio"
    return SessionConfig(fields, own.split_granularity or "sentence")
