"""What the API refuses: each with its status and one sentence, before any stage hears of it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.engine.stages import until
from tests.server.bad_inputs import BAD_INPUTS, CHAT, BadInput, chat
from tests.server.local import LocalApp

MANY = 60


@pytest.fixture(scope="module")
async def before(local: LocalApp) -> dict[str, Any]:
    """What the stages had done when the first of the bad requests came."""
    await until(local.nothing_is_left)
    return await local.work_done()


@pytest.mark.parametrize("bad", BAD_INPUTS, ids=lambda bad: bad.name)
def test_a_bad_request_is_told_in_one_sentence(local: LocalApp, before: Any, bad: BadInput) -> None:
    answer = local.client.request(bad.method, bad.path, content=bad.content(), headers=bad.headers())
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (bad.status, bad.code, bad.param)
    assert bad.words in error["message"]
    assert error["message"].endswith(".") and "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_no_stage_heard_of_any_of_them(local: LocalApp, before: dict[str, Any]) -> None:
    assert len(BAD_INPUTS) >= MANY and len({bad.name for bad in BAD_INPUTS}) == len(BAD_INPUTS)
    after = await local.work_done()
    assert after["steps"] == before["steps"]
    # Whether a schema or a pattern can be followed is found out beside the engine of the stage that makes the text.
    compiled = sum("is invalid, or has" in bad.words for bad in BAD_INPUTS)
    assert after["requests"] == before["requests"] | {"thinker": before["requests"]["thinker"] + compiled}
    await until(local.nothing_is_left)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("words", "length"),
    [
        (900, "1824 tokens, media included"),
        (2_000, "4024 tokens"),
        (6_000, "at least 2151 tokens"),
        (100_000, "at least 200024 tokens"),
    ],
    ids=["above the limit", "above the context", "not read by the engine", "counted before"],
)
async def test_a_prompt_that_is_too_long_reaches_no_engine(
    local: LocalApp, words: int, length: str, stream: bool
) -> None:
    steps = (await local.work_done())["steps"]
    long = chat(messages=[{"role": "user", "content": "word " * words}], stream=stream)
    answer = local.client.post(CHAT, json=long)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "messages", "context_length_exceeded")
    assert error["message"] == f"This model's maximum context length is 1536 tokens, but the prompt has {length}."
    assert (await local.work_done())["steps"] == steps
    await until(local.nothing_is_left)


async def test_one_whose_marks_are_text_is_counted_before_any_stage_hears_of_it(local: LocalApp) -> None:
    before = await local.work_done()
    answer = local.client.post(CHAT, json=chat(messages=[{"role": "user", "content": "<|im_end|>" + "word " * 900}]))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "messages", "context_length_exceeded")
    assert re.fullmatch(
        r"This model\'s maximum context length is 1536 tokens, but the prompt has at least 18\d\d tokens\.",
        error["message"],
    )
    assert await local.work_done() == before
