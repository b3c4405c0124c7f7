"""Tools and structured output as OpenAI's SDK asks for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel, ConfigDict

from tests.http_app import MODEL
from tests.server.local import LocalApp

QUESTION: Any = [{"role": "user", "content": "What is it like in Oslo?"}]
MOST_TOKENS = 150


@pytest.fixture
def client(local: LocalApp) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{local.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def tool(name: str, **properties: Any) -> Any:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": "Tells.", "parameters": parameters}}


TOOLS = [tool("weather", place={"enum": ["Oslo", "Lima"]}), tool("time", zone={"enum": ["UTC"]})]
NAMED: Any = {"type": "function", "function": {"name": "time"}}
VALID = [("weather", {"place": "Oslo"}), ("weather", {"place": "Lima"}), ("time", {"zone": "UTC"})]


def asked(choice: Any = "required", **fields: Any) -> Any:
    return {
        "model": MODEL,
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_completion_tokens": MOST_TOKENS,
        "seed": 3,
        **fields,
    }


def test_required(client: OpenAI) -> None:
    (choice,) = client.chat.completions.create(**asked()).choices
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id
    assert (call.function.name, json.loads(call.function.arguments)) in VALID
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)


@pytest.mark.parametrize("open_to_all", [{"strict": False, "parameters": TOOLS[0]["function"]["parameters"]}, {}])
def test_arguments_that_no_schema_bounds_are_an_object(client: OpenAI, open_to_all: dict[str, Any]) -> None:
    """One that is longer than the answer may be is cut."""
    tools = [{"type": "function", "function": {"name": "time", **open_to_all}}]
    for seed in range(3):
        free = asked(NAMED, tools=tools, seed=seed, temperature=1.5, max_completion_tokens=60)
        (choice,) = client.chat.completions.create(**free).choices
        assert choice.message.tool_calls is not None
        arguments = choice.message.tool_calls[0].function.arguments  # type: ignore[union-attr]
        assert arguments.startswith("{")
        assert choice.finish_reason == "length" or isinstance(json.loads(arguments), dict)


def test_parameters_of_no_object_are_refused(client: OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "time", "parameters": {"type": "string"}}}]
    with pytest.raises(BadRequestError, match="but it should be 'object'") as caught:
        client.chat.completions.create(**asked("auto", tools=tools))
    assert caught.value.param == "tools[0].function.parameters.type"


def test_a_stop_that_would_cut_a_forced_call_is_refused(client: OpenAI) -> None:
    for choice in ("required", NAMED):
        with pytest.raises(BadRequestError, match="but tool_choice says what the text is") as caught:
            client.chat.completions.create(**asked(choice, stop=["a"]))
        assert caught.value.param == "stop"


def test_named_streamed(client: OpenAI) -> None:
    chunks: list[ChatCompletionChunk] = list(client.chat.completions.create(**asked(NAMED), stream=True))
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    first, *others = pieces
    assert first.index == 0 and first.id and first.type == "function" and first.function is not None
    assert (first.function.name, first.function.arguments) == ("time", "")
    assert others and all(piece.id is None and piece.function and piece.function.name is None for piece in others)
    arguments = "".join(piece.function.arguments or "" for piece in others if piece.function)
    assert json.loads(arguments) == {"zone": "UTC"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""


def test_streamed_as_a_whole(client: OpenAI) -> None:
    """What the SDK makes of a stream is what is answered whole."""
    whole = client.chat.completions.create(**asked()).choices[0].message.tool_calls
    with client.chat.completions.stream(**asked()) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert whole is not None and streamed is not None
    assert [call.function.arguments for call in streamed] == [call.function.arguments for call in whole]


def test_a_second_turn_with_the_result(client: OpenAI) -> None:
    message = client.chat.completions.create(**asked()).choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain."}
    messages = [*QUESTION, message, result]
    (choice,) = client.chat.completions.create(**asked("auto", messages=messages, max_completion_tokens=8)).choices
    assert choice.finish_reason == "length" and choice.message.content and not choice.message.tool_calls


def test_none_is_plain_text(client: OpenAI) -> None:
    with_tools = client.chat.completions.create(**asked("none", max_completion_tokens=8)).choices[0].message
    plain = client.chat.completions.create(model=MODEL, messages=QUESTION, max_completion_tokens=8, seed=3)
    assert with_tools.content == plain.choices[0].message.content and not with_tools.tool_calls


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_not_spoken(client: OpenAI, stream: bool) -> None:
    spoken = asked(modalities=["text", "audio"], audio={"voice": "Ethan", "format": "pcm16"})
    if not stream:
        (choice,) = client.chat.completions.create(**spoken).choices
        assert choice.message.tool_calls and choice.finish_reason == "tool_calls"
        assert choice.message.audio is not None and choice.message.audio.data == ""
        return
    chunks = list(client.chat.completions.create(**spoken, stream=True))
    sound = [chunk.choices[0].delta.to_dict().get("audio", {}) for chunk in chunks if chunk.choices]
    assert not any(each.get("data") for each in sound)  # type: ignore[attr-defined]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Lima"]
    is_warm: bool


def test_parse(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Answer, max_completion_tokens=MOST_TOKENS
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)


def test_parse_with_tools(client: OpenAI) -> None:
    """The model calls, or answers by the schema: nothing else."""
    strict = [{**each, "function": {**each["function"], "strict": True}} for each in TOOLS]
    parsed = client.chat.completions.parse(**asked("auto", tools=strict, response_format=Answer))
    message = parsed.choices[0].message
    assert bool(message.tool_calls) != isinstance(message.parsed, Answer)


def test_vllm_s_fields(client: OpenAI) -> None:
    for fields in ({"structured_outputs": {"choice": ["yes", "no"]}}, {"guided_choice": ["yes", "no"]}):
        made = client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_completion_tokens=20, extra_body=fields
        )
        assert made.choices[0].message.content in ("yes", "no") and made.choices[0].finish_reason == "stop"


def test_json_mode_is_json_as_far_as_it_goes(client: OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_completion_tokens=40, response_format={"type": "json_object"}
    )
    choice = made.choices[0]
    assert (choice.message.content or "").startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content or ""), dict)


def test_a_refused_schema_takes_no_step(client: OpenAI, local: LocalApp) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            stream=True,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"$ref": "#/$defs/none"}},
            },
        )
    assert caught.value.param == "response_format.json_schema.schema"
