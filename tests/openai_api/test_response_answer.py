"""Responses and their events, as OpenAI's own types read them."""

from __future__ import annotations

from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from omni_cluster.openai_api.completion import Usage
from omni_cluster.openai_api.errors import error_body
from omni_cluster.openai_api.response_answer import ResponseAnswer
from omni_cluster.types.outputs import CallDelta, TokenChoice, TokenLogprob
from tests.openai_api.response_bodies import TOOL, parse

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = Usage(prompt_tokens=5, completion_tokens=2)
MESSAGE = ["output_item.added", "content_part.added", "output_text.delta"]
MESSAGE_DONE = ["output_text.done", "content_part.done", "output_item.done"]


def answer(**fields: Any) -> ResponseAnswer:
    return ResponseAnswer(parse(**fields), response_id="resp_7", created_at=100)


def read(events: list[dict[str, Any]], first: int = 0) -> list[str]:
    """The events' types, once each is one of OpenAI's to the letter and counts on."""
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    for event in events:
        EVENT.validate_python(event, strict=True)
    return [event["type"].removeprefix("response.") for event in events]


def test_the_events_of_a_text() -> None:
    response = answer()
    events = response.start() + response.text("Hi") + response.text(" you") + response.end("stop", USAGE)
    assert read(events) == ["created", "in_progress", *MESSAGE, "output_text.delta", *MESSAGE_DONE, "completed"]
    assert events[0]["response"].items() >= {"id": "resp_7", "status": "in_progress", "output": []}.items()
    assert [event["delta"] for event in events if "delta" in event] == ["Hi", " you"]
    assert events[6]["text"] == "Hi you" and events[7]["part"]["text"] == "Hi you"
    (item,) = events[-1]["response"]["output"]
    assert item == events[-2]["item"] and {event["item_id"] for event in events if "item_id" in event} == {item["id"]}


def test_the_whole_response() -> None:
    response = answer(metadata={"a": "b"}, instructions="Go.", tools=[TOOL])
    response.text("Hi")
    response.end("stop", USAGE, omni={"stages": {}})
    body = response.body()
    found = Response.model_validate(body, strict=True)
    assert found.output_text == "Hi" and found.status == "completed" and found.incomplete_details is None
    assert (found.metadata, found.instructions, found.created_at) == ({"a": "b"}, "Go.", 100)
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens) == (5, 2, 7)
    assert (body["store"], body["previous_response_id"], body["omni"]) == (False, None, {"stages": {}})


def test_one_that_was_cut_off_is_incomplete_and_so_is_its_last_item() -> None:
    response = answer()
    response.text("Hi")
    assert read(response.end("length", USAGE), 3)[-1] == "incomplete"
    found = Response.model_validate(response.body(), strict=True)
    assert found.status == "incomplete" and found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.output[0].status == "incomplete"


def test_calls_are_items_of_their_own() -> None:
    response = answer(tools=[TOOL])
    pieces = [CallDelta(0, "call_1", "weather"), CallDelta(0, arguments='{"city"'), CallDelta(0, arguments=': "Rome"}')]
    events = response.text("I look.") + response.calls(pieces)
    events += response.calls([CallDelta(1, "call_2", "weather", "{}")]) + response.end("tool_calls", USAGE)
    called = ["output_item.added", "function_call_arguments.delta"]
    done = ["function_call_arguments.done", "output_item.done"]
    wanted = [*MESSAGE, *MESSAGE_DONE, *called, called[1], *done, *called, *done, "completed"]
    assert read(events) == wanted
    message, first, second = Response.model_validate(response.body(), strict=True).output
    assert message.type == "message" and first.type == second.type == "function_call"
    assert (first.call_id, first.name, first.arguments) == ("call_1", "weather", '{"city": "Rome"}')
    assert first.status == "completed" and second.call_id == "call_2"
    assert [event["output_index"] for event in events if event["type"].endswith("output_item.done")] == [0, 1, 2]


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    response = answer()
    assert read(response.end("stop", USAGE)) == [*MESSAGE[:2], *MESSAGE_DONE, "completed"]
    assert Response.model_validate(response.body(), strict=True).output_text == ""


def test_logprobs_are_told_with_their_text_and_of_all_of_it() -> None:
    one = TokenLogprob("Hi", -0.5)
    response = answer(top_logprobs=1)
    events = response.text("Hi", [TokenChoice(one, (one,))]) + response.text(" you", [TokenChoice(one, (one,))])
    events += response.end("stop", USAGE)
    read(events)
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [len(each) for each in deltas] == [1, 1] and deltas[0][0]["top_logprobs"][0]["token"] == "Hi"
    (message,) = Response.model_validate(response.body(), strict=True).output
    assert [each.logprob for each in message.content[0].logprobs] == [-0.5, -0.5]


def test_a_failure_is_an_error_and_the_response_s_end() -> None:
    response = answer()
    response.start()
    response.text("Hi")
    error = error_body("It died.", status=503, code="stage_died")["error"]
    events = response.fail(error)
    assert read(events, 5) == ["error", "failed"]
    assert events[0].items() >= {"message": "It died.", "code": "stage_died", "error": error}.items()
    found = Response.model_validate(response.body(), strict=True)
    assert found.status == "failed" and found.error is not None and found.error.message == "It died."
    assert found.output_text == "Hi"
