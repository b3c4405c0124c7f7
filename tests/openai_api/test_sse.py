from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_cluster.openai_api.errors import error_body
from omni_cluster.openai_api.sse import DONE, event, named_event

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def parsed(stream: bytes) -> list[str]:
    """The data of each event, by the rules of the specification, with lines cut as str.splitlines cuts them."""
    events, data = [], []
    for line in stream.decode("utf-8").splitlines():
        if line:
            field, _, value = line.partition(":")
            assert field == "data"
            data.append(value.removeprefix(" "))
        elif data:
            events.append("\n".join(data))
            data = []
    assert not data, "the last event has no end"
    return events


@given(st.lists(st.dictionaries(st.text(), values, max_size=4), max_size=4))
def test_events_are_parsed_back(sent: list[dict[str, Any]]) -> None:
    stream = b"".join(event(data) for data in sent) + DONE
    *events, last = parsed(stream)
    assert [json.loads(data) for data in events] == sent
    assert last == "[DONE]"


@pytest.mark.parametrize("text", ["a\nb\r\nc\rd", "\u2028\u2029\x85\x0b\x0c\x1c", "data: [DONE]\n\n", "\ud800", "ü 🎧"])
def test_no_text_breaks_an_event(text: str) -> None:
    (data,) = parsed(event({"text": text}))
    assert json.loads(data) == {"text": text}


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_json_lacks_is_not_sent(number: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        event({"value": number})


def test_an_error_in_a_stream_has_the_shape_of_openai() -> None:
    (data,) = parsed(event(error_body("The talker was lost.", status=503, code="stage_lost")))
    assert json.loads(data) == {
        "error": {
            "message": "The talker was lost.",
            "type": "service_unavailable_error",
            "param": None,
            "code": "stage_lost",
        }
    }


def test_an_event_may_say_its_name_too() -> None:
    assert named_event({"type": "response.created", "n": 1}) == (
        b'event: response.created\ndata: {"type":"response.created","n":1}\n\n'
    )
