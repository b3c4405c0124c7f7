"""What the API refuses: each with its status and one sentence, before any stage hears of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.bad_inputs import BAD_INPUTS, CHAT, BadInput, chat
from tests.cluster.served import ServedApp, until
from tests.cluster.test_app import nothing_is_left

MANY = 60


@pytest.fixture(scope="module")
async def before(served: ServedApp) -> list[dict[str, Any]]:
    """What the stages had done when the first of the bad requests came."""
    return await work_done(served)


async def work_done(served: ServedApp) -> list[dict[str, Any]]:
    return [{"requests": s["requests"], "steps": s["engine"].get("steps")} for s in await served.statuses()]


@pytest.mark.parametrize("bad", BAD_INPUTS, ids=lambda bad: bad.name)
def test_a_bad_request_is_told_in_one_sentence(served: ServedApp, before: Any, bad: BadInput) -> None:
    answer = served.client.request(bad.method, bad.path, content=bad.content(), headers=bad.headers())
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (bad.status, bad.code, bad.param)
    assert bad.words in error["message"]
    assert error["message"].endswith(".") and "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_no_stage_heard_of_any_of_them(served: ServedApp, before: list[dict[str, Any]]) -> None:
    assert len(BAD_INPUTS) >= MANY and len({bad.name for bad in BAD_INPUTS}) == len(BAD_INPUTS)
    assert await work_done(served) == before
    assert await nothing_is_left(served)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("words", "length"),
    [(900, "1824 tokens, media included"), (2_000, "4024 tokens"), (100_000, "at least 35722 tokens")],
    ids=["above the limit", "above the context", "not read to its end"],
)
async def test_a_prompt_that_is_too_long_reaches_no_engine(
    served: ServedApp, words: int, length: str, stream: bool
) -> None:
    steps = [work["steps"] for work in await work_done(served)]
    long = chat(messages=[{"role": "user", "content": "word " * words}], stream=stream)
    answer = served.client.post(CHAT, json=long)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "messages", "context_length_exceeded")
    assert error["message"] == f"the prompt has {length}; at most 1536 fit."
    assert [work["steps"] for work in await work_done(served)] == steps
    await until(lambda: nothing_is_left(served), "all stages let go of the request")
