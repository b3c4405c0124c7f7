from __future__ import annotations

from typing import Any

import pytest

from omni_cluster.openai_api.tools import Tool, ToolCall, template_calls, template_tools, tool_use_of


def call(arguments: str) -> ToolCall:
    return ToolCall.model_validate({"id": "1", "function": {"name": "weather", "arguments": arguments}})


def test_a_template_is_given_what_the_client_sent_and_no_more() -> None:
    sent: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    assert template_tools([Tool.model_validate(sent | {"cache_control": {"type": "ephemeral"}})]) == (sent,)


def test_arguments_become_objects() -> None:
    (made,) = template_calls([call('{"place": "Oslo", "days": [1, 2]}')])
    assert made == {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": {"place": "Oslo", "days": [1, 2]}},
    }


@pytest.mark.parametrize("arguments", ["", "no", "[1]", "null", '{"place": "Os', '{"a":' * 900 + "1" + "}" * 900])
def test_arguments_that_are_no_object_stay_text_as_a_cut_call_has_them(arguments: str) -> None:
    whole, cut = template_calls([call("{}"), call(arguments)])
    assert (whole["function"]["arguments"], cut["function"]["arguments"]) == ({}, arguments)


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": ["object"]}, {"$ref": "#/$defs/a"}])
def test_parameters_may_leave_their_type_open(parameters: dict[str, Any] | None) -> None:
    asked = Tool.model_validate({"type": "function", "function": {"name": "weather", "parameters": parameters}})
    assert tool_use_of([asked], "auto", None, None) is not None
