"""What a row asks for."""

from __future__ import annotations

import base64
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from omni_cluster.batch.errors import BadRow, BatchError
from omni_cluster.batch.row import body_of, content_of, id_of

MODEL = "preset:tiny"
MOST_BYTES = 100
HELLO = [{"role": "user", "content": "Hello"}]


def body(row: dict[str, Any]) -> dict[str, Any]:
    return body_of({"id": "a", "messages": HELLO} | row, MODEL, MOST_BYTES)


def part_of(part: dict[str, Any]) -> Any:
    return body({"messages": [{"role": "user", "content": [part]}]})["messages"][0]["content"][0]


def test_a_row_is_the_request_s_fields_without_nulls_and_other_columns() -> None:
    asked = body({"temperature": 0.5, "seed": 7, "top_p": None, "reference": "not for the model", "stop": ["."]})
    assert asked == {"model": MODEL, "messages": HELLO, "temperature": 0.5, "seed": 7, "stop": ["."]}
    assert json.loads(content_of({"id": "a", "messages": HELLO}, MODEL, MOST_BYTES)) == body({})


def test_a_row_may_name_its_model() -> None:
    assert body({"model": "another"})["model"] == "another"


@pytest.mark.parametrize(
    ("row", "audio"),
    [
        ({"voice": "Ethan"}, {"format": "wav", "voice": "Ethan"}),
        ({"modalities": ["text", "audio"]}, {"format": "wav"}),
        ({"modalities": ["text"]}, None),
        ({}, None),
    ],
)
def test_sound_is_wav_and_asked_for_by_a_voice_or_by_modalities(row: dict[str, Any], audio: Any) -> None:
    assert body(row).get("audio") == audio


@pytest.mark.parametrize(
    "row",
    [
        {"messages": b"[]"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": b"Hi"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "audio", "path": "\ud800"}]}]},
        {"messages": "[" * 100_000},
        {"temperature": Decimal("0.5")},
        {"modalities": 3},
    ],
)
def test_a_row_of_what_no_json_holds_is_a_bad_row(row: dict[str, Any]) -> None:
    with pytest.raises(BadRow):
        content_of({"id": "a", "messages": HELLO} | row, MODEL, MOST_BYTES)


def test_pictures_are_refused() -> None:
    with pytest.raises(BadRow, match="modalities has 'image', but a batch's answers have no pictures"):
        body({"modalities": ["text", "image"]})


def test_messages_may_be_json_text_and_lose_the_nulls_that_arrow_adds() -> None:
    arrow = [{"role": "user", "content": [{"type": "text", "text": "Hi", "path": None, "bytes": None}], "name": None}]
    assert body({"messages": arrow})["messages"] == [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert body({"messages": json.dumps(HELLO)})["messages"] == HELLO
    with pytest.raises(BadRow, match=r"messages is 'Hello', which is no JSON"):
        body({"messages": "Hello"})


def test_media_are_given_as_bytes_or_by_path_or_as_the_api_has_them(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"pixels")
    url = "data:application/octet-stream;base64," + base64.b64encode(b"pixels").decode()
    assert part_of({"type": "image", "path": str(file)}) == {"type": "image_url", "image_url": {"url": url}}
    assert part_of({"type": "audio", "path": file.as_uri()}) == {"type": "audio_url", "audio_url": {"url": url}}
    by_bytes = part_of({"type": "video", "bytes": b"pixels", "fps": 1.0})
    assert by_bytes == {"type": "video_url", "video_url": {"url": url}, "fps": 1.0}
    own = {"type": "image_url", "image_url": {"url": "https://host.example/a.png"}}
    assert part_of(own) == own


@pytest.mark.parametrize(
    ("part", "code", "said"),
    [
        ({"type": "image", "path": "/nowhere/a.png"}, "media_not_found", "'/nowhere/a.png' is no file"),
        ({"type": "image", "path": "/"}, "media_not_found", "'/' is no file"),
        ({"type": "image", "path": "x://host/a"}, "media_not_found", "'x://host/a' cannot be read"),
        ({"type": "image", "path": 7}, "bad_row", "path of a part is 7"),
        ({"type": "image", "path": "a", "bytes": b"a"}, "bad_row", "a path and bytes; give one"),
        ({"type": "image", "bytes": "text"}, "bad_row", "bytes of a part is a str"),
        ({"type": "text", "path": "a"}, "bad_row", "has the type 'text'; use one of audio, image, video"),
        ({"type": "audio", "bytes": b"x" * 101}, "media_too_large", "has 101 bytes, but at most 100"),
    ],
)
def test_media_that_cannot_be_had_are_refused_in_one_sentence(part: dict[str, Any], code: str, said: str) -> None:
    with pytest.raises(BadRow, match=said) as refused:
        part_of(part)
    assert refused.value.code == code


def test_a_file_above_the_bound_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "large.wav").write_bytes(b"x" * 101)
    with pytest.raises(BadRow, match=r"large.wav' has 101 bytes, but at most 100 are accepted"):
        part_of({"type": "audio", "path": str(tmp_path / "large.wav")})


@pytest.mark.parametrize("row", [{}, {"id": None}, {"id": 7}, {"id": ""}])
def test_a_row_without_an_id_ends_the_batch(row: dict[str, Any]) -> None:
    with pytest.raises(BatchError, match="give each row a string of its own"):
        id_of(row)
