"""The events that a client sends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError
from pydantic_core import from_json

from omni_cluster.openai_api.bodies import check_marks, check_size
from omni_cluster.openai_api.errors import BadRequest, invalid
from omni_cluster.openai_api.realtime.parts import Part
from omni_cluster.openai_api.wire import beyond_parser, refusal, shown

MOST_EVENT_BYTES: Final = 16 << 20
"""The largest frame that Serve's proxy carries: 15 MiB of sound as base64."""
MOST_MARKS: Final = 65_536
MOST_ID_CHARS: Final = 512
Id = Annotated[str, Field(min_length=1, max_length=MOST_ID_CHARS)]
MOST_MS: Final = 2**53
"""Up to it a number is the same in every client and as a float here."""
ROOT: Final = "root"
"""The place before the first item."""


class ClientEvent(Part):
    """`event_id`: the client's own, which an error about the event names."""

    event_id: Annotated[str, Field(max_length=MOST_ID_CHARS)] | None = None


class SessionUpdate(ClientEvent):
    """Settings that change; the others stay."""

    session: dict[str, Any]


class AppendSound(ClientEvent):
    """`audio`: base64 of sound in the session's input format."""

    audio: str


class CommitSound(ClientEvent):
    """The sound so far becomes an item."""


class ClearSound(ClientEvent):
    """The sound so far is forgotten."""


class CreateItem(ClientEvent):
    """`previous_item_id`: None for the end, `ROOT` for the front."""

    item: dict[str, Any]
    previous_item_id: Id | None = None


class RetrieveItem(ClientEvent):
    """The client asks to be shown an item."""

    item_id: Id


class DeleteItem(ClientEvent):
    """Later responses do not know the item."""

    item_id: Id


class TruncateItem(ClientEvent):
    """The client stopped to listen `audio_end_ms` after the beginning of an answer's sound."""

    item_id: Id
    content_index: int = Field(default=0, ge=0)
    audio_end_ms: int = Field(ge=0, le=MOST_MS)


class CreateResponse(ClientEvent):
    """`response`: what differs from the session's settings."""

    response: dict[str, Any] | None = None


class CancelResponse(ClientEvent):
    """`response_id`: None for the one that runs."""

    response_id: Id | None = None


KINDS: Final[Mapping[str, type[ClientEvent]]] = {
    "session.update": SessionUpdate,
    "input_audio_buffer.append": AppendSound,
    "input_audio_buffer.commit": CommitSound,
    "input_audio_buffer.clear": ClearSound,
    "conversation.item.create": CreateItem,
    "conversation.item.retrieve": RetrieveItem,
    "conversation.item.delete": DeleteItem,
    "conversation.item.truncate": TruncateItem,
    "response.create": CreateResponse,
    "response.cancel": CancelResponse,
}


class EventRefused(BadRequest):
    """A client's event that cannot be read; `event_id`: the client's name of it."""

    def __init__(self, error: BadRequest, event_id: str | None) -> None:
        super().__init__(error.message, param=error.param, code=error.code, status=error.status)
        self.event_id = event_id


def client_event(text: str) -> ClientEvent:
    """Raises EventRefused."""
    event_id = None
    try:
        event = event_object(text, MOST_EVENT_BYTES)
        named = event.get("event_id")
        event_id = named if isinstance(named, str) else None
        return _kind(event.get("type")).model_validate(event)
    except ValidationError as error:
        raise EventRefused(refusal(error.errors(include_url=False)[0]), event_id) from None
    except BadRequest as error:
        raise EventRefused(error, event_id) from None


def event_object(text: str, most_bytes: int) -> dict[str, Any]:
    """Raises BadRequest."""
    body = text.encode("utf-8", "surrogatepass")
    check_size(body, most_bytes)
    check_marks(body, MOST_MARKS)
    try:
        event = from_json(body)
    except ValueError as error:
        raise beyond_parser("The event", str(error)) or _no_object() from None
    if not isinstance(event, dict):
        raise _no_object()
    if not _is_finite(event):  # what is kept of it is sent back
        raise BadRequest("The event has a number that is not finite; JSON has no such number.", code="invalid_json")
    return event


def _no_object() -> BadRequest:
    return BadRequest("The event is not a JSON object; send one with a type.", code="invalid_json")


def _is_finite(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(_is_finite, parts))


def _kind(name: object) -> type[ClientEvent]:
    if isinstance(name, str) and name in KINDS:
        return KINDS[name]
    raise invalid("type", f"type is {shown(name)}, but the events of a client are {', '.join(KINDS)}.")
