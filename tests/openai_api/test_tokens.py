"""Requests for tokens of a text, and for the text of tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.tokens import TokenizeRequest, parse_detokenize, parse_tokenize
from tests.openai_api.parts import HELLO, LIMITS, png_of


def tokenize(**fields: Any) -> TokenizeRequest:
    return parse_tokenize(json.dumps(fields).encode(), models=["omni"], limits=LIMITS)


def detokenize(**fields: Any) -> list[int]:
    return parse_detokenize(json.dumps(fields).encode(), models=["omni"], limits=LIMITS)


def test_a_prompt_or_messages_are_taken_with_or_without_a_model() -> None:
    assert tokenize(prompt="Hi") == TokenizeRequest("Hi", (), (), False)
    assert tokenize(prompt="") == TokenizeRequest("", (), (), False)
    asked = tokenize(model="omni", messages=HELLO, return_token_strs=True, add_special_tokens=False)
    assert asked.messages == ({"role": "user", "content": [{"type": "text", "text": "hello"}]},)
    assert asked.wants_strings and asked.prompt is None
    assert detokenize(tokens=[1, 2]) == [1, 2] and detokenize(model="omni", tokens=[]) == []


PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": png_of("red")}}]}]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "prompt", "prompt or messages, one of them"),
        ({"prompt": "a", "messages": HELLO}, "prompt", "prompt or messages, one of them"),
        ({"prompt": ["a"]}, "prompt", "should be a valid string"),
        ({"prompt": "a", "model": "gpt"}, "model", "does not exist"),
        ({"messages": []}, "prompt", "prompt or messages, one of them"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        ({"messages": PICTURE}, "messages", "messages have media"),
        ({"messages": HELLO, "add_generation_prompt": False}, "add_generation_prompt", "should be true"),
        ({"messages": HELLO, "continue_final_message": True}, "continue_final_message", "which is not supported"),
        ({"messages": HELLO, "chat_template": "x"}, "chat_template", "which is not supported"),
    ],
)
def test_a_bad_request_is_told_in_one_sentence(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        tokenize(**fields)
    assert caught.value.param == param
    assert words in caught.value.message and caught.value.message.endswith(".")


@pytest.mark.parametrize(
    ("fields", "param"), [({}, "tokens"), ({"tokens": "a"}, "tokens"), ({"tokens": [1, -1]}, "tokens[1]")]
)
def test_tokens_are_a_list_of_ids(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        detokenize(**fields)
    assert caught.value.param == param
