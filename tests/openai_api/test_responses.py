"""What `/v1/responses` accepts, and the chat that it makes of it."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.responses import (
    open_responses_request,
)
from omni_cluster.openai_api.structured import Structure
from tests.openai_api.parts import LIMITS, png_of, wav_of
from tests.openai_api.response_bodies import TOOL, checked, parse

FORM = {"type": "json_schema", "name": "place", "schema": {"type": "object"}}
PICTURE = {"type": "input_image", "image_url": png_of("red"), "detail": "auto"}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def text(role: str, *texts: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": each} for each in texts]}


def call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "id": "fc_1", "call_id": call_id, "name": "weather", "arguments": arguments}


def answered(call_id: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def test_a_text_is_one_message_of_the_user() -> None:
    chat = parse().chat
    assert chat.messages == (text("user", "hello"),)
    assert (chat.wants_audio, chat.stream, chat.sampling) == (False, False, {})


def test_instructions_come_first() -> None:
    assert parse(instructions="Be brief.").chat.messages == (text("system", "Be brief."), text("user", "hello"))


def test_items_are_messages() -> None:
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}], "status": "completed"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []},
                {"type": "refusal", "refusal": "No."},
            ],
        },
        {"role": "user", "content": "Why?"},
    ]
    assert parse(input=items).chat.messages == (
        text("system", "Be kind."),
        text("user", "Hi"),
        text("assistant", "Hello", "No."),
        text("user", "Why?"),
    )


def test_calls_belong_to_what_the_assistant_said_before_them() -> None:
    items = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "I look."},
        call("a", '{"city": "Rome"}'),
        call("b"),
        answered("a", "dry"),
        answered("b", [{"type": "input_text", "text": "wet"}]),
        call("c"),
    ]
    _, said, first, second, alone = parse(input=items, tools=[TOOL]).chat.messages
    assert said["content"] == text("assistant", "I look.")["content"]
    assert [each["id"] for each in said["tool_calls"]] == ["a", "b"]
    assert said["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert first == text("tool", "dry") | {"tool_call_id": "a"}
    assert second == text("tool", "wet") | {"tool_call_id": "b"}
    assert alone["role"] == "assistant" and alone["content"] == [] and alone["tool_calls"][0]["id"] == "c"


def test_media_are_decoded_as_a_chat_s() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": wav_of([0, 16384] * 200), "format": "wav"}}
    file = {"type": "input_file", "file_data": png_of("blue"), "filename": "a.png"}
    chat = parse(input=user(PICTURE, sound, {"type": "input_text", "text": "What?"}, file)).chat
    assert [image[0, 0].tolist() for image in chat.images] == [[255, 0, 0], [0, 0, 255]]
    assert chat.audios[0].tolist() == [0, 0.5] * 200
    assert [part["type"] for part in chat.messages[0]["content"]] == ["image", "audio", "text", "image"]


def test_what_is_named_by_url_is_asked_for_by_the_client_s_own_path() -> None:
    asked = checked(input=[*user({"type": "input_text", "text": "x"}), *user(PICTURE | {"image_url": "https://a.b/c"})])
    (url,) = asked.urls
    assert (url.param, url.url) == ("input[1].content[0].image_url", "https://a.b/c")
    png = base64.b64decode(png_of("red").partition(",")[2])
    assert len(open_responses_request(asked, {url.param: png}, LIMITS).chat.images) == 1


def test_thoughts_of_other_models_are_left_out_and_named() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "xyz"}
    asked = parse(input=[{"role": "user", "content": "Hi"}, thought])
    assert asked.chat.messages == (text("user", "Hi"),)
    removed = {"id": "rs_1", "type": "reasoning", "action": "removed", "reason": "model_mismatch"}
    assert asked.repeated["input_transformations"] == [removed]
    assert "input_transformations" not in parse().repeated


def test_tools_and_sampling_go_by_a_chat_s_names() -> None:
    asked = parse(
        tools=[TOOL], tool_choice="auto", max_output_tokens=9, temperature=0.5, top_p=0.9, seed=3, stop="x", top_k=5
    )
    assert asked.chat.tools == (
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
    )
    assert asked.chat.sampling == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 9, "stop": "x", "top_k": 5}
    assert asked.chat.seed == 3


def test_what_may_be_called_and_what_the_text_must_be() -> None:
    chosen = {"type": "function", "name": "weather"}
    use = parse(tools=[TOOL | {"strict": True}], tool_choice=chosen, parallel_tool_calls=False).chat.tool_use
    assert use is not None and (use.must_call, use.name, use.is_parallel) == (True, "weather", False)
    form = {"type": "json_schema", "name": "place", "strict": True, "schema": {"type": "object"}}
    asked = parse(text={"format": form})
    assert asked.chat.structure == Structure("json", {"type": "object"}, "text.format.schema")
    assert asked.repeated["text"] == {"format": form}


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"top_logprobs": 4}, 4),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, 2),
        ({"include": ["reasoning.encrypted_content"]}, None),
    ],
)
def test_logprobs(fields: dict[str, Any], most: int | None) -> None:
    assert parse(**fields).chat.sampling.get("logprobs") == most


def test_the_response_repeats_what_was_asked() -> None:
    fields = {"metadata": {"a": "b"}, "max_output_tokens": 7, "parallel_tool_calls": False, "instructions": "Go."}
    repeated = parse(**fields, tools=[TOOL], tool_choice="none").repeated
    assert repeated.items() >= (fields | {"tool_choice": "none", "text": {"format": {"type": "text"}}}).items()
    assert repeated["tools"] == [TOOL | {"description": None}]


HABITS: list[dict[str, Any]] = [
    {"store": True, "user": "me", "safety_identifier": "x", "service_tier": "auto"},
    {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "truncation": "auto", "background": False},
    {"previous_response_id": None, "conversation": None, "prompt": None, "tools": [], "include": [], "text": None},
    {"reasoning": {"effort": None, "summary": None}, "text": {"format": {"type": "text"}, "verbosity": "medium"}},
    {"stream": True, "stream_options": {"include_obfuscation": True, "include_usage": True}, "modalities": ["text"]},
    {"max_tool_calls": 3},
    {"seed": -1, "max_output_tokens": -1},
]


@pytest.mark.parametrize("fields", HABITS)
def test_habits_that_change_nothing_are_taken(fields: dict[str, Any]) -> None:
    chat = parse(**fields).chat
    assert (chat.messages, chat.sampling, chat.seed) == ((text("user", "hello"),), {}, None)


def in_item(**item: Any) -> dict[str, Any]:
    return {"instructions": "s", "input": [{"role": "user", "content": "Hi"}, item]}


def in_part(**part: Any) -> dict[str, Any]:
    return in_item(role="user", content=[{"type": "input_text", "text": "Hi"}, part])


PART = "input[1].content[1]"
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "input is null, but it should be a string or a list of items"),
    ({"input": []}, "input", "should not be empty"),
    ({"input": [{"type": "reasoning", "id": "r"}]}, "input", "input has no message"),
    ({"model": "gpt"}, "model", 'The model "gpt" does not exist'),
    ({"input": "x" * 200_000}, "", "at most 200000 are accepted"),
    ({"max_output_tokens": 257}, "max_output_tokens", "max_output_tokens is 257, but at most 256 are accepted"),
    ({"max_output_tokens": 0.5}, "max_output_tokens", "is 0.5"),
    ({"temperature": 3}, "temperature", "is 3"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "no answer is kept: send the whole conversation"),
    ({"conversation": "conv_1"}, "conversation", "no answer is kept"),
    ({"prompt": {"id": "p"}}, "prompt", "no prompts are kept"),
    ({"background": True}, "background", "an answer is given at once"),
    ({"modalities": ["text", "audio"]}, "modalities", "no sound is given here: use /v1/chat/completions"),
    ({"audio": {"voice": "Ethan"}}, "audio", "no sound is given here"),
    ({"truncation": "some"}, "truncation", 'send "auto" or "disabled"'),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort", 'is "high", which is not supported'),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "not supported"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type", 'is "yaml"'),
    ({"text": {"format": FORM | {"colour": 1}}}, "text.format.colour", "is 1"),
    ({"text": {"format": FORM | {"schema": {"type": "number", "multipleOf": 3}}}}, "text.format.schema.multipleOf", ""),
    ({"tool_choice": "required"}, "tool_choice", "no tools are given"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", "the tools are weather"),
    ({"include": ["all"]}, "include[0]", 'is "all"'),
    ({"colour": "red"}, "colour", 'colour is "red", which is not supported'),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function': the server runs no tools of its own"),
    ({"tools": [TOOL | {"name": ""}]}, "tools[0].name", "tools[0].name"),
    ({"tools": [TOOL | {"name": 3}]}, "tools[0].name", "is 3"),
    ({"tools": [TOOL | {"parameters": {"type": "string"}}]}, "tools[0].parameters.type", "should be 'object'"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading", "not supported"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "should be 'auto', 'none', 'required' or"),
    ({"tool_choice": "maybe"}, "tool_choice", 'is "maybe"'),
    ({"max_tool_calls": 0.5}, "max_tool_calls", "is 0.5"),
    ({"metadata": {"a": 1}}, "metadata.a", "is 1"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a", "at most 512"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "at most 16"),
    (in_item(type="item_reference", id="msg_1"), "input[1].id", "none is kept; send the item itself"),
    (in_item(id="msg_1"), "input[1].id", "none is kept"),
    (in_item(type="web_search_call", id="ws_1"), "input[1].type", 'is "web_search_call", but it should be'),
    (in_item(role="robot", content="x"), "input[1].role", 'is "robot"'),
    (in_item(role="user"), "input[1].content", "is required"),
    (in_item(role="user", content=[]), "input[1].content", "should not be empty"),
    (in_item(role="assistant", content=[PICTURE]), "input[1].content[0]", "only user messages may hold media"),
    (in_item(**call("c" * 4097)), "input[1].call_id", "at most 4096"),
    (in_item(**answered("c", [PICTURE])), "input[1].output[0]", "only user messages may hold media"),
    (in_item(**answered("c" * 4097, "x")), "input[1].call_id", "at most 4096"),
    (in_part(type="smell"), f"{PART}.type", 'is "smell", but it should be'),
    (in_part(type="input_text"), f"{PART}.text", "is required"),
    (in_part(type="input_image", file_id="f"), f"{PART}.file_id", "not supported"),
    (in_part(type="input_image", image_url="a.png"), f"{PART}.image_url", "should be an http(s) URL"),
    (in_part(type="input_image", image_url="data:image/png;base64,AAAA"), f"{PART}.image_url", f"{PART}.image_url"),
    (in_part(type="input_audio", input_audio={"data": "AAAA", "format": "x"}), f"{PART}.input_audio.format", 'is "x"'),
    (in_part(type="input_audio", input_audio={"format": "wav"}), f"{PART}.input_audio.data", "is required"),
    (in_part(type="input_file", file_data="data:text/plain;base64,AA"), f"{PART}.file_data", "of a sound, an image"),
    (in_part(type="input_file", file_data="data:image/png;base64,AA"), f"{PART}.file_data", f"{PART}.file_data"),
    (in_part(type="input_file", file_id="f"), f"{PART}.file_id", "send its data as file_data"),
    (in_part(type="input_file", file_url="https://a.b"), f"{PART}.file_url", "send its data as file_data"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_a_refusal_names_the_client_s_own_field(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**fields)
    error = caught.value
    assert (error.param or "") == param and words in error.message
    assert error.message.endswith(".") and "messages[" not in error.message
