"""Calls of tools in the thinker, and what the stages behind it hear of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from omni_cluster.models.stage import Stage
from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import KnownOutput, OmniRequest, ToolUse
from omni_cluster.types.outputs import Call, StageChunk, join_calls
from tests.engine.stages import collect, request, until_free

MOST_TOKENS = 100


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


USE = ToolUse((tool("weather", place={"enum": ["Oslo", "Lima"]}), tool("time", zone={"enum": ["UTC"]})))
CALL = r'<tool_call>\n\{"name": "time", "arguments": \{"zone": "UTC"\}\}\n</tool_call>'


def calling(name: str, use: ToolUse, **sampling: Any) -> OmniRequest:
    asked = {"max_tokens": MOST_TOKENS, **sampling}
    return request(name, sampling={"thinker": asked}, tool_use=use)


def read(call: Call) -> tuple[str, Any]:
    return call.name, json.loads(call.arguments)


VALID = [("weather", {"place": "Oslo"}), ("weather", {"place": "Lima"}), ("time", {"zone": "UTC"})]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "seed": 3}], ids=["greedy", "seeded"])
async def test_a_reply_that_must_call(tight_thinker: Stage, sampling: dict[str, Any]) -> None:
    use = replace(USE, must_call=True, is_parallel=False)
    made = await collect(tight_thinker.generate(calling(f"must-{len(sampling)}", use, **sampling)))
    (call,) = join_calls(made.calls)
    assert read(call) in VALID and (made.text, made.finish_reason) == ("", "stop")
    assert made.rows is not None and made.rows.end == len(made.prompt_token_ids or ())


async def test_a_reply_that_must_call_one_tool(tight_thinker: Stage) -> None:
    made = await collect(tight_thinker.generate(calling("named", replace(USE, must_call=True, name="time"))))
    (call,) = join_calls(made.calls)
    assert read(call) == ("time", {"zone": "UTC"})


async def test_what_would_cut_a_forced_call_is_refused(tight_thinker: Stage) -> None:
    """Its mark has an `a`. A call of the model's own will may be cut, as any text."""
    tight_thinker.check(calling("cut-own", USE, stop=["a"]))
    tight_thinker.check(calling("cut-none", replace(USE, must_call=True), stop=[]))
    with pytest.raises(RequestError, match=r"^stop of stage thinker would cut the call that is asked for"):
        tight_thinker.check(calling("cut", replace(USE, must_call=True), stop=["a"]))


async def test_a_reply_of_either_kind(tight_thinker: Stage) -> None:
    """Calls, or what its structure says, and nothing else."""
    for number in range(3):
        sampling = {"structured_outputs": {"choice": ["yes", "no"]}, "temperature": 1.5, "seed": number}
        made = await collect(tight_thinker.generate(calling(f"either-{number}", USE, **sampling)))
        calls = [read(call) for call in join_calls(made.calls)]
        assert (made.text in ("yes", "no") and not calls) or (not made.text and made.finish_reason == "length") or calls


async def test_of_what_is_said_before_a_call_the_rows_go_on_and_no_others(tight_thinker: Stage) -> None:
    """Without grammar of our own: a pattern stands for what a model says of its own will."""
    asked = calling("said", USE)
    plain = request("said-kept", sampling={"thinker": {"max_tokens": MOST_TOKENS, **pattern(f"Hi\\. {CALL}")}})
    whole = await collect(tight_thinker.generate(plain))
    assert whole.text.startswith("Hi. <tool_call>") and whole.rows is not None
    kept = {"thinker": KnownOutput(whole.token_ids, whole.finish_reason)}
    again = await collect(tight_thinker.generate(replace(asked, known=kept)))
    assert again.rows is not None and again.rows.end <= whole.rows.end
    assert again.rows.end == len(whole.prompt_token_ids or ()) + spoken_tokens(tight_thinker, whole)


def pattern(regex: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": regex}}


def spoken_tokens(stage: Any, whole: StageChunk) -> int:
    mark = stage.llm.renderer.get_tokenizer().get_vocab()["<tool_call>"]
    return whole.token_ids.index(mark) if mark in whole.token_ids else len(whole.token_ids) - 1


async def test_begun_again_it_calls_as_it_would_have(tight_thinker: Stage) -> None:
    use = replace(USE, must_call=True, is_parallel=False)
    asked = calling("whole", use, temperature=0.9, seed=5)
    chunks = [chunk async for chunk in tight_thinker.generate(asked)]
    whole = StageChunk.joined(chunks)
    for cut in range(1, len(chunks), max(1, len(chunks) // 5)):
        before = StageChunk.joined(chunks[:cut])
        known = {"thinker": KnownOutput(before.token_ids, before.finish_reason)}
        made = await collect(tight_thinker.generate(replace(asked, request_id=f"whole-{cut}", known=known)))
        assert (made.token_ids, made.text) == (whole.token_ids, "")
        (call,) = join_calls([*before.calls, *made.calls])
        assert read(call) == read(join_calls(whole.calls)[0])
    await until_free(tight_thinker)
