"""Requests to go on with a text: what is accepted, one sentence for what is not, and the answers' shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omni_cluster.openai_api.completion import Usage
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.text_completion import (
    MAX_CHOICES,
    ChoiceText,
    CompletionRequest,
    TextStream,
    parse_completion,
)
from omni_cluster.types.outputs import TokenChoice, TokenLogprob
from tests.openai_api.parts import LIMITS


def parse(**fields: Any) -> CompletionRequest:
    body = {"model": "omni", "prompt": "Hello", **fields}
    return parse_completion(json.dumps(body).encode(), models=["omni"], limits=LIMITS)


def test_what_is_left_out_has_openai_s_defaults() -> None:
    assert parse() == CompletionRequest("omni", ("Hello",), 1, False, None, False, False, {"max_tokens": 16}, None)
    nothing = {"best_of": 1, "n": 1, "echo": False, "stream": None, "suffix": None, "logit_bias": {}, "stop": None}
    nothing |= {"user": "me", "add_special_tokens": True, "truncate_prompt_tokens": -1, "use_beam_search": False}
    assert parse(**nothing) == parse()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["x"] * MAX_CHOICES, ("x",) * MAX_CHOICES),
        (list(range(5000)), (tuple(range(5000)),)),
    ],
)
def test_a_prompt_has_one_of_four_shapes(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert parse(prompt=prompt).prompts == prompts


def test_sampling_is_vllm_s() -> None:
    given = {"temperature": 0.5, "top_k": 3, "min_p": 0.1, "stop": ["a"], "stop_token_ids": [7], "logprobs": 2}
    asked = parse(**given, max_tokens=9, seed=-4, n=2, best_of=2, logit_bias={"7": -100})
    assert asked.sampling == given | {"max_tokens": 9, "seed": -4, "logit_bias": {7: -100}}
    assert (asked.seed, asked.n, asked.logprobs) == (-4, 2, 2)


def test_any_length_and_any_seed_are_asked_for_by_minus_one() -> None:
    asked = parse(max_tokens=-1, seed=-1)
    assert (asked.sampling, asked.seed) == ({}, None)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"model": "gpt"}, "model", "does not exist; use one of omni"),
        ({"prompt": None}, "prompt", "a string, a list of strings"),
        ({"prompt": ""}, "prompt", "should not be empty"),
        ({"prompt": []}, "prompt", "a string, a list of strings"),
        ({"prompt": ["a", ""]}, "prompt", "should not be empty"),
        ({"prompt": [[1], []]}, "prompt", "should not be empty"),
        ({"prompt": ["a", 1]}, "prompt", "a string, a list of strings"),
        ({"prompt": [1, -1]}, "prompt", "a string, a list of strings"),
        ({"prompt": [True]}, "prompt", "a string, a list of strings"),
        ({"prompt": [1.0]}, "prompt", "a string, a list of strings"),
        ({"prompt": [[["a"]]]}, "prompt", "a string, a list of strings"),
        ({"prompt": {"a": 1}}, "prompt", "a string, a list of strings"),
        ({"prompt": ["x"] * (MAX_CHOICES + 1)}, "prompt", f"at most {MAX_CHOICES} prompts"),
        ({"prompt": ["x"] * 9, "n": 8}, "n", "at most 64 of 72 answers"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 65}, "n", "less than or equal to 64"),
        ({"best_of": 3}, "best_of", "should be n, which is 1"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 257}, "max_tokens", "at most 256"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logprobs": 0, "echo": True}, "logprobs", "are not returned"),
        ({"suffix": "x"}, "suffix", "which is not supported"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "which is not supported"),
        ({"messages": [1]}, "messages", "use /v1/chat/completions"),
        ({"max_token": 1}, "max_token", "use max_tokens, or leave it out"),
        ({"max_tokens": -2}, "max_tokens", "greater than or equal to 1, or -1 for as many as fit"),
        ({"use_beam_search": True}, "use_beam_search", "which is not supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only for streams"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"temperature": "hot"}, "temperature", "valid number"),
    ],
)
def test_a_bad_request_is_told_in_one_sentence(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert words in caught.value.message and caught.value.message.endswith(".")


def test_a_prompt_is_required() -> None:
    with pytest.raises(BadRequest, match=r"prompt is required\."):
        parse_completion(b'{"model": "omni"}', models=["omni"], limits=LIMITS)


def test_logprobs_have_the_shape_of_completions() -> None:
    choice = ChoiceText(3, 1)
    a, b = TokenLogprob("ab", -1.0), TokenLogprob("c", -0.5)
    assert choice.said("ab", [TokenChoice(a, (b, a))])["logprobs"] == {
        "tokens": ["ab"],
        "token_logprobs": [-1.0],
        "top_logprobs": [{"c": -0.5, "ab": -1.0}],
        "text_offset": [0],
    }
    said = choice.said("c", [TokenChoice(b, (b, a))], "stop")
    assert said["logprobs"]["text_offset"] == [2] and said["logprobs"]["top_logprobs"] == [{"c": -0.5}]
    assert (said["index"], said["text"], said["finish_reason"]) == (3, "c", "stop")
    assert ChoiceText(0, None).said("x")["logprobs"] is None


def test_a_stream_tells_its_usage_where_it_was_asked_for() -> None:
    plain, told = TextStream(parse(stream=True)), TextStream(parse(stream=True, stream_options={"include_usage": True}))
    choice = ChoiceText(0, None).said("x")
    assert "usage" not in plain.chunk(choice) and plain.usage(Usage(1, 2)) is None
    assert told.chunk(choice)["usage"] is None and told.chunk(choice)["object"] == "text_completion"
    last = told.usage(Usage(1, 2))
    assert last is not None and last["choices"] == [] and last["usage"]["total_tokens"] == 3
