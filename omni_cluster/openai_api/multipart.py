"""Bodies of type `multipart/form-data`, read in memory and under bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header

from omni_cluster.openai_api.errors import BadRequest, invalid
from omni_cluster.openai_api.wire import shown

FORM_TYPE: Final = "multipart/form-data"
MAX_PARTS: Final = 64
MAX_TEXT_BYTES: Final = 65_536
"""Of all parts that are no file, together."""
HEADS_BYTES: Final = 1 << 20
"""Room for texts and part headers in a body beside its file: more than `MAX_PARTS` of both can be."""
FILE: Final = "file"
_BOUNDS: Final = {"MAX_HEADER_COUNT": 8, "MAX_HEADER_SIZE": 4096, "MAX_MEMORY_FILE_SIZE": float("inf")}
_SLICE_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Part:
    """One field of a form, as it came."""

    name: str
    data: bytes


def parse_form(body: bytes | bytearray, content_type: str) -> list[Part]:
    """The parts in their order; only those called "file" may be large.

    Raises BadRequest for a body that is no whole form of the boundary that `content_type` names, and for one of too
    many parts.
    """
    parts: list[Part] = []
    ends: list[bool] = []

    def add(found: Field | File) -> None:
        if len(parts) == MAX_PARTS:
            raise _bad(f"The form has more than {MAX_PARTS} fields, which is the most that is accepted.")
        parts.append(_part(found))

    try:
        parser = FormParser(FORM_TYPE, add, add, lambda: ends.append(True), _boundary(content_type), config=_BOUNDS)
        for start in range(0, len(body), _SLICE_BYTES):
            parser.write(bytes(body[start : start + _SLICE_BYTES]))
    except FormParserError:
        raise _bad(
            "The request body is no form with the boundary that its header Content-Type names, or a part of it has no "
            "name; let the HTTP client write them."
        ) from None
    if not ends:
        raise _bad("The request body ends before its form does; send it whole, its closing boundary too.")
    _check_texts(parts)
    return parts


def text_of(part: Part) -> str:
    """Raises BadRequest for what is no UTF-8."""
    try:
        return part.data.decode("utf-8")
    except UnicodeDecodeError:
        raise invalid(part.name, f"{part.name} is no text in UTF-8.") from None


def _part(found: Field | File) -> Part:
    """A field of its own, or one that names a file: that changes nothing."""
    if isinstance(found, Field):
        return Part(_name(found.field_name), found.value or b"")
    found.file_object.seek(0)
    return Part(_name(found.field_name), found.file_object.read())


def _name(sent: bytes | None) -> str:
    return (sent or b"").decode("utf-8", "replace")


def _check_texts(parts: list[Part]) -> None:
    size_bytes = 0
    for part in parts:
        size_bytes += len(part.data) if part.name != FILE else 0
        if size_bytes > MAX_TEXT_BYTES:
            raise BadRequest(
                f"The fields of the form up to {shown(part.name)} have more than {MAX_TEXT_BYTES} bytes beside the "
                "file, which is the most that is accepted.",
                code="request_too_large",
                status=413,
            )


def _boundary(content_type: str) -> bytes:
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise _bad("The header Content-Type names no boundary of the form; let the HTTP client write it.")
    return boundary


def _bad(sentence: str) -> BadRequest:
    return BadRequest(sentence, code="invalid_form")
