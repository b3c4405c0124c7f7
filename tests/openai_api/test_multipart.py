"""Forms: read whole and in memory, or refused in one sentence."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.multipart import MAX_PARTS, MAX_TEXT_BYTES, Part, parse_form, text_of
from tests.openai_api.forms import BOUNDARY, CONTENT_TYPE, form

FILE = bytes(range(256)) * 9000 + b"\r\n--" + BOUNDARY[:-1].encode() + b"\r\n"


def refused(body: bytes, content_type: str = CONTENT_TYPE) -> str:
    with pytest.raises(BadRequest) as caught:
        parse_form(body, content_type)
    assert caught.value.message.endswith(".") and "\n" not in caught.value.message
    return caught.value.message


def test_parts_come_as_they_were_sent() -> None:
    parts = parse_form(form(("model", "omni"), ("a[]", "x"), ("a[]", ""), ("größe", "ä\r\n"), file=FILE), CONTENT_TYPE)
    assert [(part.name, part.data) for part in parts] == [
        ("model", b"omni"), ("a[]", b"x"), ("a[]", b""), ("größe", "ä\r\n".encode()), ("file", FILE),
    ]  # fmt: skip
    assert text_of(parts[3]) == "ä\r\n"


def test_the_boundary_may_be_quoted() -> None:
    content_type = f'Multipart/Form-Data; charset=utf-8; boundary="{BOUNDARY}"'
    assert parse_form(form(("model", "omni")), content_type) == [Part("model", b"omni")]


@pytest.mark.parametrize(
    ("body", "content_type", "words"),
    [
        (form(("a", "b")), "multipart/form-data", "names no boundary"),
        (form(("a", "b")), "multipart/form-data; boundary=", "names no boundary"),
        (form(("a", "b")), "multipart/form-data; boundary=other", "no form with the boundary"),
        (form(("a", "b")), "multipart/form-data; boundary=" + "x" * 500, "no form with the boundary"),
        (b"", CONTENT_TYPE, "ends before its form does"),
        (form(("a", "b"))[:-8], CONTENT_TYPE, "ends before its form does"),
        (form(("a", "b"), file=FILE)[:-1000], CONTENT_TYPE, "ends before its form does"),
        (b"{}", CONTENT_TYPE, "no form with the boundary"),
        (form(("a", "b")).replace(b'; name="a"', b""), CONTENT_TYPE, "has no name"),
        (form(("a", "b")).replace(b"form-data", b"x" * 5000), CONTENT_TYPE, "no form with the boundary"),
        (form(*[("a", "b")] * (MAX_PARTS + 1)), CONTENT_TYPE, f"more than {MAX_PARTS} fields"),
        (form(("prompt", "x" * (MAX_TEXT_BYTES + 1))), CONTENT_TYPE, f"more than {MAX_TEXT_BYTES} bytes"),
        (form(*[("a", "x" * 2000)] * 40), CONTENT_TYPE, f"more than {MAX_TEXT_BYTES} bytes"),
    ],
)
def test_what_is_no_whole_form_is_told_in_one_sentence(body: bytes, content_type: str, words: str) -> None:
    assert words in refused(body, content_type)


def test_text_that_is_no_utf_8_names_its_field() -> None:
    (part,) = parse_form(form(("prompt", b"\xff\xfe")), CONTENT_TYPE)
    with pytest.raises(BadRequest, match="prompt is no text in UTF-8") as caught:
        text_of(part)
    assert caught.value.param == "prompt"


@given(st.binary(max_size=400), st.integers(0, 400), st.integers(0, 400))
def test_whatever_comes_is_read_or_refused(noise: bytes, first: int, last: int) -> None:
    body = form(("model", "omni"), file=b"abc" * 20)
    with contextlib.suppress(BadRequest):
        parse_form(body[:first] + noise + body[last:], CONTENT_TYPE)
