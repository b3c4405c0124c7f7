"""From a row to the body of its request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from omni_cluster.batch.errors import BadRow, BatchError
from omni_cluster.batch.media import inlined

Row = Mapping[str, Any]

SOUND_FORMAT: Final = "wav"
_FIELDS: Final = (
    "messages",
    "model",
    "modalities",
    "temperature",
    "top_p",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "ignore_eos",
    "stop",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "tools",
    "tool_choice",
    "use_audio_in_video",
    "sampling_params_list",
    "stage_sampling_params",
)
_NESTED: Final = ("messages", "tools", "sampling_params_list", "stage_sampling_params")
"""Fields that may be JSON text: a column has one type, and a message's content has two."""


def id_of(row: Row) -> str:
    """Raises BatchError: rows without ids could not be resumed."""
    row_id = row.get("id")
    if not isinstance(row_id, str) or not row_id:
        raise BatchError(f"a row's id is {row_id!r}; give each row a string of its own in the column 'id'.")
    return row_id


def content_of(row: Row, model: str, max_media_bytes: int) -> bytes:
    """The request's body. Reads media files, so call it in a thread. Raises BadRow."""
    try:
        return json.dumps(body_of(row, model, max_media_bytes)).encode()
    except (TypeError, ValueError, RecursionError) as error:  # of a column's type, or of what JSON text in it holds
        raise BadRow(f"the row is no JSON ({error}); give text, numbers, lists and objects.") from None


def body_of(row: Row, model: str, max_media_bytes: int) -> dict[str, Any]:
    """What the row asks for: fields that are null are left out. Raises BadRow."""
    given = {name: _given(name, row[name]) for name in _FIELDS if row.get(name) is not None}
    body = {"model": model} | {name: _without_nulls(value) for name, value in given.items()}
    body["messages"] = inlined(body.get("messages"), max_media_bytes)
    if "image" in body.get("modalities", ()):
        raise BadRow("modalities has 'image', but a batch's answers have no pictures; leave it out.")
    voice = row.get("voice")
    if voice is not None or "audio" in body.get("modalities", ()):
        body["audio"] = {"format": SOUND_FORMAT} | ({} if voice is None else {"voice": voice})
    return body


def _given(name: str, value: Any) -> Any:
    if name not in _NESTED or not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise BadRow(f"{name} is {value[:60]!r}, which is no JSON; give a list, or a list as JSON text.") from None


def _without_nulls(value: Any) -> Any:
    """Arrow gives every object of a column the keys of all others, with null where there was none."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
