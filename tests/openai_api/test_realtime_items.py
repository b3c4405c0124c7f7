"""Items of a realtime conversation."""

from __future__ import annotations

import base64
import gc
import json
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.realtime.items import PART_BYTES, Conversation, Item, sent_item, spoken_item
from omni_cluster.openai_api.realtime.session import Pcm

SOUND = base64.b64encode(bytes(4_800)).decode()
SHORTEST = base64.b64encode(bytes(2 * 482)).decode()
LONG = "a" * 10_000
PICTURE = "data:image/png;base64,AAAA"


def read(item: dict[str, Any]) -> Item:
    return sent_item(item, Pcm(), 10)[0]


def said(text: str, item_id: str | None = None, role: str = "user") -> Item:
    content = [{"type": "output_text" if role == "assistant" else "input_text", "text": text}]
    return read({"type": "message", "role": role, "content": content, "id": item_id})


def test_a_message_is_the_chat_s_and_its_media_are_beside_it() -> None:
    content = [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_audio", "audio": SOUND, "transcript": "Hello"},
        {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
    ]
    item, urls = sent_item({"type": "message", "role": "user", "content": content, "id": "mine"}, Pcm(), 10)
    kinds = [part["type"] for part in item.message["content"]]
    assert (item.id, kinds, urls) == ("mine", ["text", "audio", "image"], {"item.content[2].image_url": PICTURE})
    assert [len(audio) for audio in item.audios] == [1_600]
    assert item.num_bytes == 6_400 + 3 * PART_BYTES + sys.getsizeof("What is it?") + sys.getsizeof("Hello")
    assert item.wire["content"][1:] == [
        {"type": "input_audio", "transcript": "Hello"},
        {"type": "input_image", "image_url": None},
    ]


def test_an_earlier_answer_is_its_text() -> None:
    content = [{"type": "output_audio", "transcript": "Yes."}, {"type": "text", "text": "No."}]
    item = read({"type": "message", "role": "assistant", "content": content})
    assert [part["text"] for part in item.message["content"]] == ["Yes.", "No."]
    assert [part["type"] for part in item.wire["content"]] == ["output_audio", "output_text"]


def test_calls_and_their_outputs_are_the_chat_s() -> None:
    call = read({"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'})
    assert call.template_message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    output = read({"type": "function_call_output", "call_id": "c", "output": "Rain."})
    assert (output.message["role"], output.message["tool_call_id"]) == ("tool", "c")
    assert (output.wire["type"], output.wire["output"], output.wire["status"]) == (
        "function_call_output",
        "Rain.",
        "completed",
    )


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"type": "mcp_call"}, 'item.type is "mcp_call", but the items are message, function_call'),
        ({}, "item.type is null"),
        ({"type": "message", "role": "robot", "content": []}, "role is"),
        ({"type": "message", "role": "user", "content": [{"type": "smell"}]}, "should have the type input_text"),
        ({"type": "message", "role": "user", "content": [{"type": ["text"]}]}, "should have the type input_text"),
        ({"type": "message", "role": "user", "content": ["x"]}, "should have the type input_text"),
        ({"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": "?"}]}, "not valid base64"),
        (
            {"type": "message", "role": "assistant", "content": [{"type": "input_audio", "audio": SOUND}]},
            "item.content[0] is input_audio in a message of the assistant",
        ),
        (
            {"type": "message", "role": "system", "content": [{"type": "output_audio", "transcript": "x"}]},
            "a message of the system is text",
        ),
        ({"type": "function_call_output", "call_id": ""}, "call_id is"),
    ],
)
def test_a_wrong_item_is_refused_in_a_sentence(item: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(item)
    assert words in refused.value.message


@pytest.mark.parametrize("values", [1, 240, 480])
def test_sound_that_is_too_short_for_the_model_is_refused_before_it_is_an_item(values: int) -> None:
    """Kept, it would fail each answer of the session, in a sentence that does not tell of it."""
    content = [{"type": "input_audio", "audio": base64.b64encode(bytes(2 * values)).decode()}]
    with pytest.raises(BadRequest, match=r"ms of sound, but at least 20\.0625 ms are needed") as refused:
        read({"type": "message", "role": "user", "content": content})
    assert (refused.value.param, refused.value.code) == ("item.content[0].audio", "bad_audio")


def spoken(item_id: str, num_bytes: int) -> Item:
    return spoken_item(item_id, np.zeros((num_bytes - PART_BYTES) // 4, np.float32))


def ids(conversation: Conversation) -> list[str]:
    return [item.id for item in conversation]


def test_items_have_their_places() -> None:
    conversation = Conversation(10, 1_000_000)
    assert conversation.add(said("b", "b")) is None
    assert conversation.add(said("d", "d")) == "b"
    assert conversation.add(said("a", "a"), "root") is None
    assert conversation.add(said("c", "c"), "b") == "b"
    assert ids(conversation) == ["a", "b", "c", "d"]
    for wrong in (lambda: conversation.add(said("b", "b")), lambda: conversation.add(said("e", "e"), "none")):
        with pytest.raises(BadRequest):
            wrong()
    conversation.delete("c")
    assert conversation.get("d", "code").message["content"][0]["text"] == "d"
    with pytest.raises(BadRequest) as refused:
        conversation.get("c", "item_retrieve_invalid_item_id")
    assert refused.value.code == "item_retrieve_invalid_item_id" and ids(conversation) == ["a", "b", "d"]


def test_a_fork_goes_its_own_way() -> None:
    conversation = Conversation(10, 1_000_000)
    conversation.add(said("a", "a"))
    fork = conversation.fork()
    fork.add(said("b", "b"))
    assert (ids(conversation), ids(fork)) == (["a"], ["a", "b"])


def test_the_oldest_make_room_but_no_instruction() -> None:
    conversation = Conversation(3, 8_000)
    for item in (said("Be brief.", "s", "system"), spoken("1", 4_000), said("2", "2")):
        conversation.add(item)
    conversation.add(said("3", "3"))
    assert ids(conversation) == ["s", "2", "3"]
    conversation.add(spoken("4", 6_000))
    conversation.add(spoken("5", 6_000))
    assert ids(conversation) == ["s", "5"]
    conversation.delete("5")
    for each in ("6", "7"):
        conversation.add(said(each, each))
    with pytest.raises(BadRequest, match="at most 3 with 8000 are kept"):
        conversation.add(said("8", "8"), drops_oldest=False)


@pytest.mark.parametrize(
    ("item", "previous_id", "code"),
    [
        (spoken("c", 8_004), None, "item_too_large"),
        (spoken("b", 8_000), None, "item_create_duplicate_item_id"),
        (spoken("c", 8_000), "none", "invalid_value"),
        (spoken("c", 7_000), "b", "conversation_full"),
    ],
)
def test_an_item_that_is_refused_drops_none(item: Item, previous_id: str | None, code: str) -> None:
    conversation = Conversation(3, 8_000)
    for each in (spoken("a", 4_000), spoken("b", 2_000), said("Be brief.", "s", "system")):
        conversation.add(each)
    with pytest.raises(BadRequest) as refused:
        conversation.add(item, previous_id)
    assert refused.value.code == code and ids(conversation) == ["a", "b", "s"]


def test_an_item_that_is_too_large_is_told_its_bytes_and_the_most() -> None:
    conversation = Conversation(3, 8_000)
    conversation.add(spoken("a", 8_000))
    with pytest.raises(BadRequest, match=r"has 8004 bytes, but a conversation has at most 8000;"):
        conversation.add(spoken("b", 8_004))
    conversation.add(spoken("c", 8_000))
    assert ids(conversation) == ["c"]


def message(role: str, **part: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [part]}


def call(**fields: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", **fields}


@pytest.mark.parametrize("text", ["a" * 10_000, "a" * 10_000 + "\N{GRINNING FACE}"])
@pytest.mark.parametrize(
    "of",
    [
        lambda text: message("user", type="input_text", text=text),
        lambda text: message("user", type="input_audio", audio=SOUND, transcript=text),
        lambda text: message("assistant", type="output_audio", transcript=text),
        lambda text: call(name=text),
        lambda text: call(arguments=text),
        lambda text: {"type": "function_call_output", "call_id": "c", "output": text},
    ],
)
def test_text_counts_as_it_is_in_memory(of: Callable[[str], dict[str, Any]], text: str) -> None:
    assert read(of(text)).num_bytes - read(of("a")).num_bytes == sys.getsizeof(text) - sys.getsizeof("a")


def test_what_is_written_into_an_item_counts() -> None:
    item = spoken("a", 4_000)
    item.write(content=[{"type": "input_audio", "transcript": LONG}])
    assert item.num_bytes == 4_000 + sys.getsizeof(LONG)


@pytest.mark.parametrize(
    "item",
    [
        message("user", type="input_text", text="") | {"content": [{"type": "input_text", "text": ""}] * 256},
        message("user") | {"content": [{"type": "input_audio", "audio": SHORTEST}] * 256},
        call(arguments='{"a": [' + "[], " * 10_000 + "0]}"),
    ],
)
def test_items_hold_what_counts(item: dict[str, Any]) -> None:
    sent = json.dumps(item)
    tracemalloc.start()
    items = [read(json.loads(sent)) for _ in range(20)]
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1.1 * sum(each.num_bytes for each in items)


def test_text_makes_the_oldest_leave() -> None:
    conversation = Conversation(10, 3 * sys.getsizeof(LONG))
    for each in ("a", "b", "c"):
        conversation.add(said(LONG, each))
    assert ids(conversation) == ["b", "c"]
