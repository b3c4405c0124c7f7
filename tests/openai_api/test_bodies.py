from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from omni_cluster.openai_api import chat as chat_module
from omni_cluster.openai_api.bodies import MAX_MARKS, check_marks
from omni_cluster.openai_api.chat import check_chat_request, open_chat_request
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.messages import MAX_CALLS, MAX_PARTS, MAX_URL_CHARS
from omni_cluster.openai_api.tools import MAX_ID_CHARS
from omni_cluster.openai_api.wire import shown
from tests.fuzz.hostile import HOSTILE, MODEL
from tests.openai_api.parts import LIMITS_OF_64_MIB as LIMITS

MEGABYTE = 1 << 20
MOST_FAULTS = 8
"""Of a refused body: one of each list, and one of each of few fields."""
FROM_ONE_BODY_MB = 100
"""Beside the body itself, of 20: its text, letters of four bytes each where one is wide, and what a sentence shows."""


def refused(body: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        check_chat_request(body, models=[MODEL], voices=["Chelsie"], limits=LIMITS)
    return caught.value


def asked(**fields: Any) -> bytes:
    hello = [{"role": "user", "content": "Hi"}]
    return json.dumps({"model": MODEL, "messages": hello, **fields}).encode()


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many faults were gathered of each refused body."""
    counted: list[int] = []

    checked_by = chat_module.ChatBody

    class Counting(checked_by):  # type: ignore[valid-type, misc]
        @classmethod
        def model_validate_json(cls, *args: Any, **kwargs: Any) -> Any:
            try:
                return checked_by.model_validate_json(*args, **kwargs)
            except ValidationError as error:
                counted.append(error.error_count())
                raise

    monkeypatch.setattr(chat_module, "ChatBody", Counting)
    yield counted


@pytest.mark.parametrize("name", HOSTILE)
def test_of_a_bad_body_only_the_first_faults_are_gathered(name: str, faults: list[int]) -> None:
    try:
        check_chat_request(HOSTILE[name](50_000), models=[MODEL], voices=[], limits=LIMITS)
    except BadRequest as error:
        assert len(error.message) < 400 and error.message.endswith(".")
    assert sum(faults) <= MOST_FAULTS


_CHILD = """
from pathlib import Path
from tests.fuzz.hostile import HOSTILE, MODEL
from tests.openai_api.parts import LIMITS_OF_64_MIB as LIMITS
from omni_cluster.openai_api.chat import check_chat_request, open_chat_request
from omni_cluster.openai_api.errors import BadRequest

def memory_mb(which):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) // 1024

for name, make in HOSTILE.items():
    body = make(20_000_000)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_mb("VmRSS")
    try:
        open_chat_request(check_chat_request(body, models=[MODEL], voices=[], limits=LIMITS), {}, LIMITS)
    except BadRequest as error:
        told = error.message
    else:
        raise AssertionError(f"{name} was accepted")
    print(memory_mb("VmHWM") - before, name, told, sep=", ")
"""


def test_no_large_body_takes_much_memory() -> None:
    """In a process of its own, whose peaks are known; a fault for each value would be gigabytes."""
    made = subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, timeout=500)
    assert made.returncode == 0, made.stderr
    took = made.stdout.splitlines()
    assert len(took) == len(HOSTILE)
    assert max(int(each.split(",")[0]) for each in took) < FROM_ONE_BODY_MB, took


def test_values_are_counted_before_they_are_made() -> None:
    check_marks(b"," * MAX_MARKS, MAX_MARKS)
    for marks in (b",", b"[", b"{", b"[{,"):
        with pytest.raises(BadRequest, match=f"more than {MAX_MARKS} commas and opening brackets") as caught:
            check_marks(marks * (MAX_MARKS + 1), MAX_MARKS)
        assert (caught.value.status, caught.value.code) == (413, "request_too_large")


def test_longer_prompts_have_room_for_more_values_and_text() -> None:
    assert (LIMITS.max_marks, LIMITS.max_text_chars) == (112_000, 1_792_000)
    short = replace(LIMITS, max_prompt_tokens=1)
    assert (short.max_marks, short.max_text_chars) == (MAX_MARKS, MEGABYTE)


def test_every_list_of_a_body_stops_at_its_first_fault() -> None:
    found = list(lists(chat_module.ChatBody.__pydantic_core_schema__))
    assert len(found) >= 9 and all(each["fail_fast"] for each in found)


def lists(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for inner in schema.values():
            yield from lists(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            yield from lists(inner)


MESSAGE = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
PART = {"type": "text", "text": "x"}
LONG = {"name": "f", "arguments": "x" * 1_800_000}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "param", "most"),
    [
        ({"messages": [MESSAGE] * 4097}, "messages", 4096),
        ({"messages": [{"role": "user", "content": [PART] * 1025}]}, "messages[0].content", MAX_PARTS),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 129}]}, "messages[0].tool_calls", MAX_CALLS),
        ({"tools": [TOOL] * 129}, "tools", 128),
        ({"modalities": ["text"] * 9}, "modalities", 8),
        ({"sampling_params_list": [None] * 65}, "sampling_params_list", 64),
        ({"stage_sampling_params": {str(i): {} for i in range(65)}}, "stage_sampling_params", 64),
    ],
)  # fmt: skip
def test_every_list_has_a_length_limit(fields: dict[str, Any], param: str, most: int) -> None:
    error = refused(asked(**fields))
    assert (error.status, error.param, error.code) == (400, param, "invalid_value")
    assert error.message.endswith(f"..., but it should have at most {most} entries.")


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 1


def test_valid_json_that_the_parser_does_not_read_is_not_called_invalid() -> None:
    deep, long = asked(metadata=nested(200)), asked(metadata="n").replace(b'"n"', b"1" * 4301)
    told = [refused(deep), refused(long)]
    assert [each.message for each in told] == [
        "The request body is nested deeper than 200 levels; send one that is flatter.",
        "The request body has a number of more than 4300 digits; send a shorter one.",
    ]
    assert {(each.status, each.param, each.code) for each in told} == {(400, None, "invalid_value")}
    just = asked(metadata=[nested(198), "n"]).replace(b'"n"', b"1" * 4300)
    assert check_chat_request(just, models=[MODEL], voices=[], limits=LIMITS)


def test_as_many_as_are_accepted_are() -> None:
    parts = [PART] * MAX_PARTS
    calling = {"role": "assistant", "tool_calls": [CALL] * MAX_CALLS}
    body = asked(messages=[{"role": "user", "content": parts}, calling, *[MESSAGE] * 4094], tools=[TOOL] * 128)
    chat = open_chat_request(check_chat_request(body, models=[MODEL], voices=[], limits=LIMITS), {}, LIMITS)
    assert len(chat.messages) == 4096 and len(chat.tools) == 128


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "x", "tool_call_id": "i" * (MAX_ID_CHARS + 1)},
        {"role": "assistant", "tool_calls": [{**CALL, "id": "i" * (MAX_ID_CHARS + 1)}]},
    ],
)
def test_ids_are_short(message: Any) -> None:
    assert f"should have at most {MAX_ID_CHARS} characters" in refused(asked(messages=[message])).message


def test_urls_are_short() -> None:
    url = "https://a.example/" + "x" * MAX_URL_CHARS
    error = refused(asked(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]))
    assert error.message.endswith(f"is a URL of {len(url)} characters, but at most {MAX_URL_CHARS} are accepted.")
    assert error.param == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "x" * 1_792_001}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 900_000}] * 2}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x" * 1_800_000: {}}}}]},
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": LONG}]}]},
    ],
)  # fmt: skip
def test_text_that_no_prompt_has_room_for_is_refused_before_it_is_rendered(fields: dict[str, Any]) -> None:
    error = refused(asked(**fields))
    assert (error.param, error.code) == ("messages", "context_length_exceeded")
    assert "characters of text, but at most 1792000 are accepted" in error.message


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (b"1e999", "is Infinity, but it should be a finite number"),
        (b"-1e999", "is -Infinity, but it should be a finite number"),
        (b"1" * 400, "should be a finite number"),
        (b"1" * 4300, "should be a finite number"),
        (b"-" + b"1" * 4300, "should be a finite number"),
        (b"1" * 4301, "has a number of more than 4300 digits"),
        (b"1" * 100_000, "has a number of more than 4300 digits"),
        (b"NaN", "is NaN, but it should be a finite number"),
        (b"01", "not valid JSON"),
        (b"\"\\ud800\"", "not valid JSON"),
        (b"\"\\udc00\\ud800\"", "not valid JSON"),
    ],
)  # fmt: skip
def test_numbers_that_are_none_are_refused(number: bytes, words: str) -> None:
    body = asked(temperature=1)
    assert words in refused(body.replace(b'"temperature": 1', b'"temperature": ' + number)).message


@pytest.mark.parametrize("number", [b"1" * 4300, b"1e999", b"NaN", b"-" + b"1" * 4300])
def test_numbers_in_tools_break_nothing(number: bytes) -> None:
    tool = json.dumps({**TOOL, "function": {"name": "f", "parameters": {"a": 1}}}).encode()
    body = asked(tools=[]).replace(b"[]}", b"[" + tool.replace(b'"a": 1', b'"a": ' + number) + b"]}")
    chat = open_chat_request(check_chat_request(body, models=[MODEL], voices=[], limits=LIMITS), {}, LIMITS)
    assert json.dumps(chat.tools)


def test_the_last_of_equal_keys_counts() -> None:
    body = b'{"model": "nobody", ' + asked()[1:]
    assert check_chat_request(body, models=[MODEL], voices=[], limits=LIMITS).wire.model == MODEL


@pytest.mark.parametrize("key", ["a\nb", "x" * 5000, '"', "\u2028"])
@pytest.mark.parametrize("place", ["stage", "parameter"])
def test_a_client_s_key_is_told_in_one_line(place: str, key: str) -> None:
    error = refused(asked(stage_sampling_params={key: {"heat": 1}} if place == "stage" else {"talker": {key: 1}}))
    assert "\n" not in error.message and len(error.message) < 400 and error.param is not None
    assert error.param.startswith("stage_sampling_params.") and len(error.param) < 150


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(st.text(max_size=70), inner, max_size=5),
)


@given(VALUES)
def test_a_value_is_shown_as_its_json_begins(value: Any) -> None:
    whole = json.dumps(value, ensure_ascii=False)
    assert shown(value) == (whole if len(whole) <= 60 else whole[:60] + "...")
