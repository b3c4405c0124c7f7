"""`/v1/responses` as OpenAI's SDK asks it, with nothing changed but the address."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any, Literal

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from PIL import Image
from pydantic import BaseModel, TypeAdapter

from omni_cluster.engine.answer import AnswerProgress
from omni_cluster.engine.fan_in import StageEvent
from omni_cluster.openai_api.audio import wav_bytes
from omni_cluster.server.endpoints.responses import response_events
from omni_cluster.server.streamed import AnswerStream
from omni_cluster.types.errors import DIED, StageDied
from omni_cluster.types.outputs import StageChunk
from tests.engine.stages import until
from tests.openai_api.response_bodies import parse
from tests.server.bad_inputs import MODEL
from tests.server.local import LocalApp

PATH = "/v1/responses"
QUESTION = "Tell me."
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ENDS = ("response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete")


@pytest.fixture
def client(local: LocalApp) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{local.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(local: LocalApp) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{local.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(**fields: Any) -> Any:
    """`seed` is no field of OpenAI's."""
    body = {"seed": fields.pop("seed")} if "seed" in fields else {}
    return {"model": MODEL, "input": QUESTION, "max_output_tokens": 6, "extra_body": body, **fields}


def chat_text(client: OpenAI, *messages: Any, **fields: Any) -> str | None:
    """What a chat answers to the same."""
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=6, **fields)
    return answer.choices[0].message.content


def picture() -> dict[str, Any]:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 40).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def sound() -> dict[str, Any]:
    data = wav_bytes(np.sin(np.arange(8_000) / 20).astype(np.float32), 16_000)
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def said(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [*parts, {"type": "input_text", "text": "What is it?"}]}]


def test_a_response_says_what_a_chat_says(client: OpenAI) -> None:
    response = client.responses.create(**asked(instructions="Be brief.", metadata={"a": "b"}, store=True))
    Response.model_validate(response.to_dict(), strict=True)
    assert response.output_text and response.output_text == chat_text(
        client, {"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}
    )
    assert (response.status, response.model, response.metadata) == ("incomplete", MODEL, {"a": "b"})
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None and response.usage.output_tokens == 6
    assert response.usage.total_tokens == response.usage.input_tokens + 6
    assert response.to_dict()["store"] is False and set(response.to_dict()["omni"]["stages"]) == {"thinker"}


async def test_the_events_of_a_stream(async_client: AsyncOpenAI) -> None:
    whole = await async_client.responses.create(**asked())
    stream = await async_client.responses.create(**asked(), stream=True)
    events = [event async for event in stream]
    for event in events:
        EVENT.validate_python(event.to_dict(), strict=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    begins = ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[:4] == [f"response.{each}" for each in begins] and tuple(kinds[-4:]) == ENDS
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage == whole.usage


def test_each_event_is_named_beside_its_data(local: LocalApp) -> None:
    body = {"model": MODEL, "input": QUESTION, "max_output_tokens": 6, "stream": True}
    with local.client.stream("POST", PATH, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        blocks = answer.read().decode().split("\n\n")
    assert blocks.pop() == "" and len(blocks) > 8
    for block in blocks:
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_the_sdk_s_own_stream_gathers_the_response(client: OpenAI) -> None:
    with client.responses.stream(**asked(max_output_tokens=512, input="Hi", temperature=0)) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert "response.output_text.delta" in kinds


@pytest.mark.parametrize("stream", [False, True])
def test_media_are_heard_and_seen(client: OpenAI, stream: bool) -> None:
    def input_tokens(*parts: Any) -> int:
        made: Any = client.responses.create(**asked(input=said(*parts), max_output_tokens=2, stream=stream))
        response = list(made)[-1].response if stream else made
        assert response.usage.output_tokens == 2
        found: int = response.usage.input_tokens
        return found

    text, image, audio, both = (input_tokens(*parts) for parts in ((), (picture(),), (sound(),), (picture(), sound())))
    assert image > text and audio > text
    assert both - text == (image - text) + (audio - text)


def test_an_earlier_answer_is_given_back_as_its_items(client: OpenAI) -> None:
    question: Any = {"role": "user", "content": QUESTION}
    first = client.responses.create(**asked(input=[question]))
    second = client.responses.create(**asked(input=[question, *first.output, question]))
    earlier: Any = {"role": "assistant", "content": first.output_text}
    assert second.output_text == chat_text(client, question, earlier, question)


TOOL: Any = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"place": {"enum": ["Oslo", "Lima"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}
CALLING: Any = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 150}


def test_a_call_and_its_result(client: OpenAI) -> None:
    question: Any = {"role": "user", "content": "What is it like in Oslo?"}
    response = client.responses.create(**asked(input=[question], **CALLING, seed=3))
    Response.model_validate(response.to_dict(), strict=True)
    (call,) = response.output
    assert call.type == "function_call" and call.name == "weather" and response.status == "completed"
    assert json.loads(call.arguments)["place"] in ("Oslo", "Lima")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    later = client.responses.create(**asked(input=[question, call, result], tools=[TOOL]))
    assert later.usage is not None and later.usage.input_tokens > response.usage.input_tokens  # type: ignore[union-attr]


def test_a_call_by_its_events(client: OpenAI) -> None:
    with client.responses.stream(**asked(**CALLING, seed=3)) as stream:
        events = list(stream)
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments and json.loads(call.arguments)["place"] in ("Oslo", "Lima")


class Place(BaseModel):
    name: Literal["Oslo", "Lima"]


def test_a_text_that_keeps_to_a_schema(client: OpenAI) -> None:
    response = client.responses.parse(**asked(max_output_tokens=150), text_format=Place)
    assert response.output_parsed is not None and response.output_parsed.name in ("Oslo", "Lima")
    question: Any = {"role": "user", "content": QUESTION}
    assert client.responses.create(**asked(input=[question, *response.output, question])).output_text is not None


def test_logprobs(client: OpenAI) -> None:
    response = client.responses.create(**asked(include=["message.output_text.logprobs"], top_logprobs=2))
    (message,) = response.output
    assert message.type == "message" and message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs
    assert logprobs is not None and len(logprobs) == 6
    assert {len(each.top_logprobs) for each in logprobs} == {2}


def test_no_response_is_kept(client: OpenAI) -> None:
    response = client.responses.create(**asked(max_output_tokens=1))
    for what in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="no response is kept"):
            what(response.id)
    with pytest.raises(openai.NotFoundError, match="no response is kept"):
        client.responses.input_items.list(response.id)
    with pytest.raises(openai.BadRequestError, match="no answer is kept: send the whole conversation as input"):
        client.responses.create(**asked(previous_response_id=response.id))


def test_what_is_too_long_names_the_input(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**asked(input="word " * 2000))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


async def test_a_client_that_leaves_ends_its_request(local: LocalApp, async_client: AsyncOpenAI) -> None:
    await until(local.nothing_is_left)
    stream = await async_client.responses.create(**asked(max_output_tokens=500), stream=True)
    await anext(aiter(stream))
    await stream.close()
    await until(local.nothing_is_left)


async def test_a_stream_that_breaks_says_so_in_its_last_events() -> None:
    async def broken() -> AsyncGenerator[StageEvent, None]:
        yield StageEvent("thinker", StageChunk(text="Hi", token_ids=(1,)))
        raise StageDied("a replica died")

    answer = AnswerStream(broken(), AnswerProgress({"thinker": "text"}))
    sent = [piece async for piece in response_events(parse(), answer)]
    events = [json.loads(block.partition("data: ")[2]) for block in b"".join(sent).decode().split("\n\n") if block]
    for number, event in enumerate(events):
        assert EVENT.validate_python(event, strict=True).sequence_number == number
    error, failed = events[-2:]
    assert (error["type"], error["code"], error["error"]["code"]) == ("error", "stage_died", "stage_died")
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["message"] == error["message"] == DIED
