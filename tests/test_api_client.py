"""What a client makes of what a server sends."""

from __future__ import annotations

import pytest

from omni_cluster.api_client import BadAnswer, Event, Part, Refused, events_of, refusal
from omni_cluster.openai_api import sse
from omni_cluster.openai_api.errors import error_body


def test_the_text_of_an_answer_is_read_beside_its_pictures() -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,UE5H"}}]
    for content, text in (("Hi", "Hi"), (None, ""), (parts, "Hi")):
        assert Part.of({"choices": [{"message": {"content": content}}]}).text == text


def read(*encoded: bytes) -> list[Event]:
    return list(events_of(b"".join(encoded).decode().splitlines()))


def test_events_end_at_done() -> None:
    assert read(sse.event({"n": 1}), b": comment\n\n", sse.event({"n": 2}), sse.DONE, b"data: {\n\n") == [
        {"n": 1},
        {"n": 2},
    ]


@pytest.mark.parametrize(
    ("encoded", "sentence"),
    [
        (sse.event(error_body("the stage broke.", status=503)), "the stage broke."),
        (sse.event({"n": 1}), r"without \[DONE\]"),
        (b"", r"without \[DONE\]"),
        (b"data: {broken\n\n", "no JSON"),
        (b"data: [1]\n\n", "no JSON object"),
    ],
)
def test_a_stream_that_fails_ends_with_one_sentence(encoded: bytes, sentence: str) -> None:
    with pytest.raises(BadAnswer, match=sentence):
        read(encoded)


def test_events_before_an_error_are_not_lost() -> None:
    events = events_of((sse.event({"n": 1}) + sse.event(error_body("gone."))).decode().splitlines())
    assert next(events) == {"n": 1}
    with pytest.raises(BadAnswer, match="gone"):
        next(events)


def test_a_refusal_without_a_sentence_has_its_status() -> None:
    refused = refusal(400, b'{"error": {"message": "too long."}}')
    assert isinstance(refused, Refused) and str(refused) == "too long."
    assert str(refusal(400, b'{"error": "too long."}')) == "too long."
    assert "503" in str(refusal(503, b"[1]")) and "busy" in str(refusal(503, b"busy"))
