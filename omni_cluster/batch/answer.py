"""What comes of a row, and the table of a block of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pyarrow

from omni_cluster.api_client import Part
from omni_cluster.batch.row import SOUND_FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A row of the answers: text, sound (a WAV file) and usage, or an error in one sentence with its code."""

    id: str
    text: str | None = None
    sound: bytes | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    audio_tokens: int | None = None
    error: str | None = None
    error_code: str | None = None

    @classmethod
    def of(cls, row_id: str, body: Mapping[str, Any]) -> Answer:
        """`body`: of a chat completion."""
        part = Part.of(body)
        details = part.usage.get("completion_tokens_details") or {}
        return cls(
            id=row_id,
            text=part.text,
            sound=part.sound or None,
            finish_reason=body["choices"][0].get("finish_reason"),
            prompt_tokens=part.usage.get("prompt_tokens"),
            completion_tokens=part.usage.get("completion_tokens"),
            audio_tokens=details.get("audio_tokens"),
        )


_KINDS = {"str": pyarrow.string(), "int": pyarrow.int64(), "bytes": pyarrow.large_binary()}
# A block without one sound has the columns of all others.
SCHEMA = pyarrow.schema([(each.name, _KINDS[str(each.type).partition(" ")[0]]) for each in dataclasses.fields(Answer)])


def table_of(answers: Sequence[Answer]) -> pyarrow.Table:
    return pyarrow.Table.from_pylist([dataclasses.asdict(answer) for answer in answers], schema=SCHEMA)


def sample_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """An answer as a sample of a WebDataset: `txt`, `wav`, all else as `json`. The id is also a member of its own.

    A sample's key ends at its first dot, so dots of the id are escaped in it.
    """
    rest = {name: value for name, value in row.items() if name not in ("text", "sound")}
    return {
        "id": row["id"],
        "__key__": quote(row["id"], safe="").replace(".", "%2E"),
        "txt": row["text"],
        SOUND_FORMAT: row["sound"],
        "json": json.dumps(rest),
    }
