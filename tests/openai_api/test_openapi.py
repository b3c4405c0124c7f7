"""What OpenAPI says of the bodies is what the requests are checked by."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from omni_cluster.openai_api.chat import ChatBody
from omni_cluster.openai_api.errors import error_body
from omni_cluster.openai_api.openapi import answers, request_body
from omni_cluster.openai_api.responses import ResponsesBody
from omni_cluster.openai_api.speech import SpeechBody
from omni_cluster.openai_api.text_completion import CompletionBody
from omni_cluster.openai_api.tokens import DetokenizeBody, TokenizeBody
from omni_cluster.openai_api.transcription import Task, transcription_body

BODIES = [ChatBody, SpeechBody, ResponsesBody, CompletionBody, TokenizeBody, DetokenizeBody]


def schema_of(body: type[BaseModel]) -> dict[str, Any]:
    made: dict[str, Any] = request_body(body, ["omni"])["requestBody"]["content"]["application/json"]["schema"]
    return made


@pytest.mark.parametrize("body", BODIES)
def test_a_body_s_schema_stands_alone_and_names_no_class(body: Any) -> None:
    schema = schema_of(body)
    jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(schema)
    assert "$ref" not in text and "$defs" not in text and '"_' not in text
    assert schema["properties"]["model"] == {"type": "string", "enum": ["omni"]}


def test_the_chat_s_schema_takes_what_the_api_takes() -> None:
    validator = jsonschema.Draft202012Validator(schema_of(ChatBody))
    parts = [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    body = {"model": "omni", "messages": [{"role": "user", "content": parts}], "stop": ["a"], "stream": None}
    assert validator.is_valid(body | {"sampling_params_list": [None, {"top_k": 5}, None]})
    assert validator.is_valid(body | {"top_kk": None, "stop": "", "user": "u", "best_of": 1, "top_k": 5, "n": 2})
    wrong: list[dict[str, Any]] = [
        {"model": "gpt"},
        {"messages": "Hi"},
        {"messages": [{"role": "robot", "content": "Hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
        {"temperature": 3},
        {"max_tokens": 0},
        {"stop": 5},
        {"n": 0.5},
        {"top_kk": 5},
        {"best_of": 2},
        {"messages": [{"role": "user", "content": "Hi", "mood": "good"}]},
        {"functions": [{}]},
        {"tool_choice": "any"},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        {"structured_outputs": {"choice": "a"}},
        {"sampling_params_list": [{"heat": 1}]},
    ]
    assert not [fields for fields in wrong if validator.is_valid(body | fields)]


def test_the_speech_s_schema_takes_what_the_api_takes() -> None:
    validator = jsonschema.Draft202012Validator(schema_of(SpeechBody))
    body = {"model": "omni", "input": "Hi."}
    assert validator.is_valid(body | {"voice": {"id": "Ethan"}, "speed": 1, "response_format": "aac"})
    wrong: list[dict[str, Any]] = [{"input": "x" * 4097}, {"speed": 2}, {"voice": 3}, {"response_format": "ogg"}]
    assert not [fields for fields in wrong if validator.is_valid(body | fields)]


def test_the_response_s_schema_takes_what_the_api_takes() -> None:
    validator = jsonschema.Draft202012Validator(schema_of(ResponsesBody))
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, {"type": "reasoning", "id": "rs_1"}]
    body = {"model": "omni", "input": items, "store": True, "previous_response_id": None, "tool_choice": "auto"}
    assert validator.is_valid(body | {"input": "Hi"}) and validator.is_valid(body)
    wrong: list[dict[str, Any]] = [
        {"input": 3},
        {"input": [{"role": "robot", "content": "Hi"}]},
        {"input": [{"role": "user", "content": [{"type": "smell", "text": "Hi"}]}]},
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"tools": [{"type": "web_search"}]},
        {"truncation": "some"},
    ]
    assert not [fields for fields in wrong if validator.is_valid(body | fields)]


def test_every_refusal_has_the_form_that_is_told() -> None:
    schema = answers("application/json")["4XX"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(error_body("No.", status=404, param="model", code="model_not_found"))
    assert not validator.is_valid({"detail": "Not Found"})


@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_a_form_s_schema_has_its_file(task: Task) -> None:
    content = transcription_body(task, ["omni"])["requestBody"]["content"]
    schema = content["multipart/form-data"]["schema"]
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["properties"]["file"] == {"type": "string", "format": "binary"}
    assert schema["required"] == ["file"] and list(content) == ["multipart/form-data"]
