"""Each stage on a node of Ray of its own, with an object store of its own: what crosses, and what is left."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from omni_cluster.engine.omni_llm import AsyncOmniLLM
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import OmniRequestOutput
from tests.http_app import nothing_is_left
from tests.served.app import ServedApp, until
from tests.served.leftovers import store_bytes
from tests.served.toy_config import TOY

pytestmark = pytest.mark.cluster

SHORT, LONG = "What is it?", "Count with me. " * 800
"""The rows of the long one are more than Ray gives away without its store."""
CODES = 60


def request(name: str, asked: str, codes: int = CODES) -> OmniRequest:
    exact = {stage: {"max_tokens": n, "min_tokens": n} for stage, n in (("text", 16), ("codes", codes))}
    return OmniRequest(name, asked, voice="high", sampling=exact)


async def of_one_process(requests: Sequence[OmniRequest]) -> list[OmniRequestOutput]:
    alone = AsyncOmniLLM(TOY)
    await alone.start()
    try:
        return [await alone.generate(each) for each in requests]
    finally:
        await alone.shutdown()


async def rows_sent(app: ServedApp) -> dict[str, int]:
    (status,) = await app.statuses_of("text")
    return dict(status["rows_sent_bytes"])


async def test_answers_are_those_of_one_process_with_all_rows_from_another_node(toy_nodes: ServedApp) -> None:
    assert len({status["node_id"] for status in await toy_nodes.statuses()}) == 3
    stored, before, prompts = store_bytes(), await rows_sent(toy_nodes), (SHORT, LONG) * 4
    asked = [request(f"nodes-{i}", prompt) for i, prompt in enumerate(prompts)]
    expected = await of_one_process(asked[:2])
    answers: list[Any] = await asyncio.gather(*map(toy_nodes.answer, asked))
    for i, answer in enumerate(answers):
        wanted = expected[i % 2]
        assert (answer.text, answer.token_ids, answer.codes) == (wanted.text, wanted.token_ids, wanted.codes)
        assert wanted.audio is not None and np.array_equal(answer.audio.samples, wanted.audio.samples)
    del answers, answer  # their sound are objects too
    after = await rows_sent(toy_nodes)
    assert after["as_objects"] - before["as_objects"] >= sum(map(len, prompts))
    await until(lambda: nothing_is_stored_beyond(toy_nodes, stored), "no object is left in any store")


async def test_a_request_that_is_left_leaves_no_object_on_any_node(toy_nodes: ServedApp) -> None:
    await until(lambda: nothing_is_left(toy_nodes), "earlier requests are gone")
    stored = store_bytes()
    call = toy_nodes.handle("ingress").answer.remote(request("left", LONG, codes=2000))  # none ends before it is seen

    async def runs() -> bool:
        return any(status["engine"]["running"] for status in await toy_nodes.statuses_of("codes"))

    await until(runs, "the second stage has the rows")
    call.cancel()
    await until(lambda: nothing_is_stored_beyond(toy_nodes, stored), "no object is left in any store")


async def nothing_is_stored_beyond(app: ServedApp, num_bytes: int) -> bool:
    return await nothing_is_left(app) and store_bytes() <= num_bytes
