"""Fields that are not read: none is passed over in silence, but for those that ask for nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.audio.speech_create_params import SpeechCreateParams
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from omni_cluster.openai_api.chat import ChatBody, ChatRequest, check_chat_request, open_chat_request
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.fields import is_nothing, kinds_of
from omni_cluster.openai_api.messages import Message
from omni_cluster.openai_api.responses import ResponsesBody
from omni_cluster.openai_api.speech import SpeechBody
from omni_cluster.openai_api.text_completion import CompletionBody
from omni_cluster.openai_api.wire import Wire
from tests.openai_api.api_page import ignored_fields
from tests.openai_api.parts import HELLO, LIMITS

NOTHINGS: list[Any] = [None, "", [], {}, False, 0]


def parse(**fields: Any) -> ChatRequest:
    body = json.dumps({"model": "omni", "messages": HELLO, **fields}).encode()
    return open_chat_request(
        check_chat_request(body, models=["omni"], voices=["Chelsie", "Ethan"], limits=LIMITS), {}, LIMITS
    )


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("annotation", "kinds"),
    [
        (str | None, set()),
        (bool | None, {bool}),
        (int | float | None, {int, float}),
        (list[int] | None, set()),
        (dict[str, bool] | None, set()),
    ],
)
def test_kinds_are_those_of_a_field_s_own_values(annotation: Any, kinds: set[type]) -> None:
    assert kinds_of(annotation) == kinds


def test_zero_is_a_number_s_value_and_false_a_switch_s() -> None:
    assert all(is_nothing(value) for value in NOTHINGS)
    assert not is_nothing(0, {int}) and not is_nothing(0.0, {float}) and is_nothing(False, {int})
    assert not is_nothing(False, {bool}) and is_nothing(0, {bool})
    assert not any(is_nothing(value) for value in (1, True, "x", [0], {"a": None}, -1))


@pytest.mark.parametrize("name", sorted(set(ChatBody.model_fields) - {"model", "messages"} | {"made_up", "best_of"}))
@pytest.mark.parametrize("value", NOTHINGS, ids=json.dumps)
def test_what_asks_for_nothing_is_as_if_it_were_left_out(name: str, value: Any) -> None:
    """But for numbers and switches of which it is a value, and for sound in a default voice."""
    field = ChatBody.model_fields.get(name)
    if (field is not None and not is_nothing(value, kinds_of(field.annotation))) or (name, value) == ("audio", {}):
        return
    read, plain = parse(**{name: value}), parse()
    assert vars(read) == vars(plain)


def test_an_unknown_field_is_named_wherever_it_is() -> None:
    part = {"type": "text", "text": "Hi", "x": 1}
    audio = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav", "x": 1}}
    places: list[tuple[dict[str, Any], str]] = [
        ({"x": 1}, "x"),
        ({"audio": {"x": 1}}, "audio.x"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"mm_processor_kwargs": {"x": 1}}, "mm_processor_kwargs.x"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
        ({"stage_sampling": {"talker": {"x": 1}}}, "stage_sampling.talker.x"),
        ({"messages": [{"role": "user", "content": "Hi", "x": 1}]}, "messages[0].x"),
        ({"messages": [{"role": "user", "content": [part]}]}, "messages[0].content[0].x"),
        ({"messages": [{"role": "user", "content": [audio]}]}, "messages[0].content[0].input_audio.x"),
    ]
    for fields, param in places:
        error = refused(**fields)
        assert (error.param, error.code) == (param, "unsupported_parameter")
        assert f"{param} is 1, which is not supported" in error.message


def subclasses(of: type[Wire]) -> set[type[Wire]]:
    return {of}.union(*map(subclasses, of.__subclasses__()))


def test_no_model_of_a_body_drops_a_field() -> None:
    for model in subclasses(Wire):
        with pytest.raises(ValueError, match="unknown_key"):
            model.model_validate({"made_up_name": 1})


@pytest.mark.parametrize(
    ("name", "wish"),
    [("temprature", "use temperature"), ("max_new_tokens", "use max_tokens"), ("Top_P", "use top_p")],
)
def test_a_name_that_is_near_is_told(name: str, wish: str) -> None:
    assert f"which is not supported; {wish}, or leave it out." in refused(**{name: 1}).message


def test_every_field_of_openai_s_is_read_or_ignored_or_refused_by_name() -> None:
    assert set(SpeechCreateParams.__annotations__) - set(SpeechBody.model_fields) == {"speed"}
    for name in set(CompletionCreateParamsBase.__annotations__) - set(ChatBody.model_fields) - ChatBody.others.ignored:
        assert refused(**{name: ["x"]}).param == name


def test_the_docs_list_what_is_ignored() -> None:
    bodies = {"chat": ChatBody, "completions": CompletionBody, "speech": SpeechBody, "a message": Message}
    for place, model in bodies.items():
        assert ignored_fields(place) == model.others.ignored, place
    read_in_vain = {"include", "stream_options", "truncation"}
    assert ignored_fields("responses") == ResponsesBody.others.ignored | read_in_vain


def test_defaults_of_other_servers_are_taken_and_other_values_are_not() -> None:
    idle = {
        **{"best_of": 1, "length_penalty": 1.0, "use_beam_search": False, "echo": False, "priority": 0},
        **{"add_generation_prompt": True, "add_special_tokens": False, "verbosity": "medium"},
        **{"max_tokens": -1, "seed": -1},
        **{"function_call": "none", "truncate_prompt_tokens": -1, "chat_template_kwargs": {"enable_thinking": False}},
    }
    assert vars(parse(**idle)) == vars(parse())
    for name in ("best_of", "length_penalty", "priority"):
        assert refused(**{name: 2}).param == name
    assert "leave it out or send 1" in refused(best_of=2).message
    assert refused(length_penalty=True).param == "length_penalty"
