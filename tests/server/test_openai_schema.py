"""Random valid requests of OpenAI's own schema: each is read as it says, or refused by naming a field."""

from __future__ import annotations

import base64
import copy
import dataclasses
import functools
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np
import pytest
from openai.types.audio.speech_create_params import SpeechCreateParams
from openai.types.audio.transcription_create_params import (
    TranscriptionCreateParamsNonStreaming,
    TranscriptionCreateParamsStreaming,
)
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsNonStreaming,
    CompletionCreateParamsStreaming,
)
from openai.types.responses.response_create_params import (
    ResponseCreateParamsNonStreaming,
    ResponseCreateParamsStreaming,
)

from omni_cluster.engine.omni_llm import AsyncOmniLLM
from omni_cluster.openai_api.chat import ChatRequest, check_chat_request, open_chat_request
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.fields import is_nothing
from omni_cluster.openai_api.responses import check_responses_request, open_responses_request
from omni_cluster.openai_api.speech import parse_speech_request
from omni_cluster.openai_api.transcription import open_transcription
from omni_cluster.server.limits import api_defaults, api_limits
from omni_cluster.server.refusals import error_answer
from omni_cluster.server.request_builder import RequestBuilder
from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import OmniRequest
from tests.engine.stages import short_default, until
from tests.openai_api.api_page import ignored_fields
from tests.server.local import LocalApp
from tests.server.schema_requests import MODEL, WAV, Maker

SENT = 12
"""Over HTTP, half of them accepted ones."""
EVERY = 5
"""Of the accepted ones, whose inner fields are left out in turn too."""

ASKS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "reasoning_effort": ("none", "auto"),
    "effort": ("none",),
    "context": ("auto",),
    "mode": ("standard",),
    "verbosity": ("medium",),
    "response_format": ({"type": "text"}, "mp3", "json"),
    "format": ({"type": "text"},),
    "modalities": (["text"],),
    "speed": (1,),
    "chunking_strategy": ("auto",),
}
"""Values that say what holds without the field, beside those that are nothing."""
SAME_AS = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens", "modalities": "audio"}
"""Where the other field is given too, this one may change nothing."""
IGNORED_INSIDE = frozenset(
    {
        "detail",
        "filename",
        "name",
        "prompt_cache_breakpoint",
        "include_obfuscation",
        "id",
        "tool_call_id",
        "call_id",
        "status",
        "phase",
    }
)
"""Ignored in messages, items, parts and options, by docs/use/api.md; no template shows the model an id of a call."""

Place = tuple[str | int, ...]


class Unstarted(AsyncOmniLLM):
    """A pipeline of which no engine is started: what an engine alone can check is not."""

    def check(self, request: OmniRequest) -> None:
        self.bound.check(request)


@functools.cache
def pipeline() -> AsyncOmniLLM:
    return Unstarted(short_default())


@functools.cache
def the_api() -> dict[str, Any]:
    bound = pipeline().bound
    voices = {"Chelsie", "Ethan"}
    return {"models": {MODEL}, "voices": voices, "limits": api_limits(bound.config), "defaults": api_defaults(bound)}


def _as_json(body: Mapping[str, Any]) -> httpx.Request:
    return httpx.Request("POST", "http://a", json=body)


def _as_form(body: Mapping[str, Any]) -> httpx.Request:
    """As OpenAI's package writes one: lists and objects by brackets, and nothing for null."""
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if isinstance(value, dict):
            fields |= {f"{name}[{key}]": each for key, each in value.items() if each is not None}
        elif value is not None and name != "file":
            fields[f"{name}[]" if isinstance(value, list) else name] = value
    files = {"file": (body["file"], base64.b64decode(WAV))} if "file" in body else {}
    # Without any file httpx would write no form of parts.
    return httpx.Request("POST", "http://a", data=fields, files=files or {"none": (None, "")})


def _read_transcription(request: httpx.Request) -> Any:
    models, limits = the_api()["models"], the_api()["limits"]
    kind = request.headers["content-type"]
    return open_transcription(request.read(), kind, "transcribe", models=models, limits=limits)


def _read_chat(request: httpx.Request) -> Any:
    """What the pipeline is asked, and in which form it is answered."""
    chat = open_chat_request(check_chat_request(request.read(), **the_api()), {}, the_api()["limits"])
    form = (chat.stream, chat.include_usage, chat.usage_in_chunks, chat.choices, chat.audio_format)
    return _asked_of_the_pipeline(chat), form


def _read_response(request: httpx.Request) -> Any:
    """What the pipeline is asked, whether it is streamed, and what the response repeats."""
    models, limits = the_api()["models"], the_api()["limits"]
    response = open_responses_request(check_responses_request(request.read(), models=models, limits=limits), {}, limits)
    return _asked_of_the_pipeline(response.chat), response.chat.stream, response.repeated


def _asked_of_the_pipeline(chat: ChatRequest) -> OmniRequest:
    random.seed(0)  # of a request without a seed
    return replace(RequestBuilder(pipeline()).of_chat(chat, "a"), request_id="a")


def _read_speech(request: httpx.Request) -> Any:
    return parse_speech_request(request.read(), **{name: the_api()[name] for name in ("models", "voices", "defaults")})


@dataclass(frozen=True)
class Endpoint:
    """Where requests of these types go, and what reads them.

    `given`: the chance of a field that may be left out; with a greater one, few requests are accepted.
    `documented_as`: its name in the table of docs/use/api.md that names the fields which are ignored.
    """

    path: str
    params: tuple[type, ...]
    num_requests: int
    given: float
    read: Callable[[httpx.Request], Any]
    documented_as: str
    encoded: Callable[[Mapping[str, Any]], httpx.Request] = _as_json

    def request(self, index: int) -> dict[str, Any]:
        return Maker(index, self.given).request(self.params[index % len(self.params)], always=("model", "input"))

    @functools.cached_property
    def ignored_fields(self) -> frozenset[str]:
        return ignored_fields(self.documented_as)


ENDPOINTS = (
    Endpoint(
        "/v1/chat/completions",
        (CompletionCreateParamsNonStreaming, CompletionCreateParamsStreaming),
        2000,
        0.12,
        _read_chat,
        "chat",
    ),
    Endpoint(
        "/v1/responses",
        (ResponseCreateParamsNonStreaming, ResponseCreateParamsStreaming),
        1000,
        0.08,
        _read_response,
        "responses",
    ),
    Endpoint(
        "/v1/audio/transcriptions",
        (TranscriptionCreateParamsNonStreaming, TranscriptionCreateParamsStreaming),
        400,
        0.15,
        _read_transcription,
        "transcriptions",
        _as_form,
    ),
    Endpoint("/v1/audio/speech", (SpeechCreateParams,), 200, 0.3, _read_speech, "speech"),
)


@dataclass(frozen=True)
class Refusal:
    """What the client is told."""

    param: str | None
    message: str
    code: str | None


@dataclass(frozen=True)
class Outcome:
    """A request with all that is made of it, in a form that compares, or its refusal."""

    body: dict[str, Any]
    made: Any

    @property
    def accepted(self) -> bool:
        return not isinstance(self.made, Refusal)


@functools.cache
def outcomes_of(endpoint: Endpoint) -> list[Outcome]:
    bodies = [endpoint.request(index) for index in range(endpoint.num_requests)]
    return [Outcome(body, read_or_refused(endpoint, body)) for body in bodies]


def read_or_refused(endpoint: Endpoint, body: Mapping[str, Any]) -> Any:
    try:
        return _comparable(endpoint.read(endpoint.encoded(body)))
    except (BadRequest, RequestError) as error:
        _, told = error_answer(error)
        return refusal_of(told)


def refusal_of(answer: dict[str, Any]) -> Refusal:
    return Refusal(*(answer["error"][name] for name in ("param", "message", "code")))


def _comparable(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _comparable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return {key: _comparable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(each) for each in value]
    return value


FEW = 4
"""A share of the requests, in `make test`."""
FEWER = [replace(endpoint, num_requests=endpoint.num_requests // FEW) for endpoint in ENDPOINTS]
each_endpoint = pytest.mark.parametrize(
    "endpoint",
    [*FEWER, *(pytest.param(endpoint, marks=pytest.mark.full) for endpoint in ENDPOINTS)],
    ids=lambda endpoint: f"{endpoint.path}-{endpoint.num_requests}",
)


@each_endpoint
def test_a_refusal_names_a_field_that_was_sent(endpoint: Endpoint) -> None:
    refused = [outcome for outcome in outcomes_of(endpoint) if not outcome.accepted]
    assert endpoint.num_requests / 10 < len(refused) < endpoint.num_requests * 9 / 10
    for outcome in refused:
        names_what_was_sent(outcome.body, outcome.made)


def names_what_was_sent(body: Any, refusal: Refusal) -> None:
    param = refusal.param
    assert param and param in refusal.message and refusal.message.endswith("."), refusal
    place = tuple(int(key) if key.isdigit() else key for key in re.findall(r"[^.\[\]]+", param))
    if refusal.code == "missing_required_parameter" or place[-1] == "call_id":
        value_at(body, place[:-1])  # OpenAI's types let it be left out; what holds it was sent
    else:
        assert not is_nothing(value_at(body, place)), refusal


def value_at(body: Any, place: Place) -> Any:
    for key in place:
        body = body[key]
    return body


@each_endpoint
def test_no_field_is_passed_over(endpoint: Endpoint) -> None:
    """An accepted request without one of its fields is another request, unless the docs say that it is ignored."""
    accepted = [outcome for outcome in outcomes_of(endpoint) if outcome.accepted]
    for index, outcome in enumerate(accepted):
        for place in fields_of(outcome.body):
            if len(place) > 1 and index % EVERY:
                continue
            if read_or_refused(endpoint, without(outcome.body, place)) == outcome.made:
                assert changes_nothing(endpoint, outcome.body, place), f"{place} of {outcome.body} is passed over"


def fields_of(value: Any, place: Place = ()) -> Iterator[Place]:
    """Where a body has fields, inner ones too."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        if isinstance(value, dict):
            yield (*place, key)
        yield from fields_of(each, (*place, key))


def without(body: dict[str, Any], place: Place) -> dict[str, Any]:
    rest = copy.deepcopy(body)
    del value_at(rest, place[:-1])[place[-1]]
    return rest


def changes_nothing(endpoint: Endpoint, body: dict[str, Any], place: Place) -> bool:
    """Whether the docs say that the field, or what it is set to, changes nothing of this request."""
    if place[0] in endpoint.ignored_fields or SAME_AS.get(str(place[0])) in body:
        return True
    if place == ("model",):
        return True  # it names the only one; another name is refused
    if IGNORED_INSIDE & set(place[1:]) or is_earlier_sound(body, place):
        return True
    if "json_schema" in place and place[-1] in ("description", "strict"):
        return True  # the text is kept to the schema in any case, and the model is not shown it
    # What is said by a type alone, an object of nothing for example, changes nothing either.
    return place[-1] == "type" or asks_nothing(str(place[-1]), value_at(body, place))


def asks_nothing(name: str, value: Any) -> bool:
    if isinstance(value, dict) and all(key in IGNORED_INSIDE or asks_nothing(key, value[key]) for key in value):
        return True
    if name == "modalities" and set(value or ()) <= {"text"}:
        return True
    return is_nothing(value) or value in ASKS_NOTHING.get(name, ()) or (name == "include" and no_logprobs(value))


def no_logprobs(include: list[str]) -> bool:
    return "message.output_text.logprobs" not in include


def is_earlier_sound(body: dict[str, Any], place: Place) -> bool:
    """Of an earlier answer, of which the text is used."""
    return "audio" in place[2:] and value_at(body, place[:2]).get("role") == "assistant"


@each_endpoint
async def test_over_http_it_is_the_same(local: LocalApp, endpoint: Endpoint) -> None:
    """What the model's own part refuses, its template or the length of its prompt, names a field too."""
    some = random.Random(29)
    accepted = [outcome.body for outcome in outcomes_of(endpoint) if outcome.accepted]
    refused = [outcome.body for outcome in outcomes_of(endpoint) if not outcome.accepted]
    answered = [names_a_field_or_answers(local, endpoint, body) for body in some.sample(accepted, SENT // 2)]
    assert sum(answered) >= SENT // 4
    await until(local.nothing_is_left)
    before = await local.work_done()
    assert not any(names_a_field_or_answers(local, endpoint, body) for body in some.sample(refused, SENT // 2))
    assert await local.work_done() == before


def names_a_field_or_answers(local: LocalApp, endpoint: Endpoint, body: dict[str, Any]) -> bool:
    sent = endpoint.encoded(body)
    answer = local.client.post(endpoint.path, content=sent.read(), headers=sent.headers)
    if answer.status_code == 200:
        return True
    assert 400 <= answer.status_code < 500
    names_what_was_sent(body, refusal_of(answer.json()))
    return False
