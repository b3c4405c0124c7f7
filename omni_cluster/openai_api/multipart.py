"""Bodies of type `multipart/form-data`, read in memory and under bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.wire import shown

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FORM_TYPE: Final = "multipart/form-data"
MAX_PARTS: Final = 64
MAX_TEXT_BYTES: Final = 65_536
"""Of all parts that are no file, together."""
HEADS_BYTES: Final = 1 << 20
"""Room for texts and part headers in a body beside its file: more than `MAX_PARTS` of both can be."""
FILE: Final = "file"
_MAX_HEADERS: Final = 8
_MAX_HEADER_BYTES: Final = 4096
_SLICE_BYTES: Final = 1 << 20


@dataclass
class Part:
    """One field of a form, as it came."""

    name: str
    data: bytearray = field(default_factory=bytearray)


def parse_form(body: bytes | bytearray, content_type: str) -> list[Part]:
    """The parts in their order; only those called "file" may be large.

    Raises BadRequest for a body that is no whole form of the boundary that `content_type` names, and for one of too
    many parts.
    """
    reader = _PartReader()
    try:
        parser = MultipartParser(
            _boundary(content_type),
            reader.callbacks(),
            max_header_count=_MAX_HEADERS,
            max_header_size=_MAX_HEADER_BYTES,
        )
        for start in range(0, len(body), _SLICE_BYTES):
            parser.write(bytes(body[start : start + _SLICE_BYTES]))
    except FormParserError:
        raise _bad(
            "The request body is no form with the boundary that its header Content-Type names; let the HTTP client "
            "write both."
        ) from None
    if not reader.is_whole:
        raise _bad("The request body ends before its form does; send it whole, its closing boundary too.")
    return reader.parts


def text_of(part: Part) -> str:
    """Raises BadRequest for what is no UTF-8."""
    try:
        return part.data.decode("utf-8")
    except UnicodeDecodeError:
        raise BadRequest(f"{part.name} is no text in UTF-8.", param=part.name, code="invalid_value") from None


class _PartReader:
    """What the parser finds, put together."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.is_whole = False
        self._names: list[str] = []
        self._header = bytearray()
        self._value = bytearray()
        self._text_bytes = 0

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header_ended,
            "on_headers_finished": self._headers_ended,
            "on_part_data": self._add,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.parts) == MAX_PARTS:
            raise _bad(f"The form has more than {MAX_PARTS} fields, which is the most that is accepted.")
        self._names.clear()

    def _header_ended(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            _, options = parse_options_header(self._value.decode("latin-1"))
            self._names += [options[b"name"].decode("utf-8", "replace")] if b"name" in options else []
        self._header.clear()
        self._value.clear()

    def _headers_ended(self) -> None:
        if len(self._names) != 1:
            raise _bad("A part of the form has no name in its header Content-Disposition; give it one.")
        self.parts.append(Part(self._names[0]))

    def _add(self, data: bytes, start: int, end: int) -> None:
        part = self.parts[-1]
        if part.name != FILE:
            self._text_bytes += end - start
            _check_texts(self._text_bytes, part)
        part.data += data[start:end]

    def _end(self) -> None:
        self.is_whole = True


def _check_texts(size_bytes: int, part: Part) -> None:
    if size_bytes > MAX_TEXT_BYTES:
        raise BadRequest(
            f"The fields of the form up to {shown(part.name)} have more than {MAX_TEXT_BYTES} bytes beside the file, "
            "which is the most that is accepted.",
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
