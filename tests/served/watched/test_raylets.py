"""Each stage on a node of Ray of its own, with an object store of its own."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import httpx
import pytest

from tests.http_app import assert_equals_reference, nothing_is_left
from tests.reference import KINDS, Reference, media, prompt_text
from tests.served.app import AUTHORIZED, BASE_URL, ServedApp, long_checkpoint, request_for, until
from tests.served.leftovers import store_bytes
from tests.served.traces import BODY, CALLER, CHAT, is_whole, of_trace

pytestmark = pytest.mark.full

LONG = "Count with me. " * 40
"""A prompt whose rows are objects of their own."""


async def node_of(served: ServedApp, stage: str) -> str:
    (status,) = await served.statuses_of(stage)
    return str(status["node_id"])


async def rows_sent(served: ServedApp) -> dict[str, int]:
    (status,) = await served.statuses_of("thinker")
    return dict(status["rows_sent_bytes"])


async def test_replies_equal_their_references_with_all_rows_from_another_node(
    watched: ServedApp, reference: Reference
) -> None:
    nodes = [await node_of(watched, stage) for stage in ("thinker", "talker", "code2wav")]
    assert len(set(nodes)) == 3
    stored, before = store_bytes(), await rows_sent(watched)
    asked = [(kind, question) for kind in KINDS for question in ("What is it?", LONG)]
    expected = [
        reference.speech(prompt_text(kind, question), *media(kind), voice="Ethan", seed=i)
        for i, (kind, question) in enumerate(asked)
    ]
    outputs: list[Any] = await asyncio.gather(
        *[
            watched.answer(request_for(kind, f"nodes-{i}", question=question, voice="Ethan", seed=i))
            for i, (kind, question) in enumerate(asked)
        ]
    )
    for output, of_reference in zip(outputs, expected, strict=True):
        assert_equals_reference(output, of_reference)
    made = sum(len(output.prompt_token_ids) + len(output.token_ids) - 1 for output in outputs)
    del outputs, output  # their sound are objects too
    after = await rows_sent(watched)
    assert after["as_objects"] - before["as_objects"] >= made * 128 * 4
    await until(lambda: nothing_is_stored_beyond(watched, stored), "no object is left in any store")


async def nothing_is_stored_beyond(served: ServedApp, num_bytes: int) -> bool:
    return await nothing_is_left(served) and store_bytes() <= num_bytes


async def test_a_trace_over_the_nodes_has_vllms_spans_within_those_of_the_stages(watched: ServedApp) -> None:
    trace_id = uuid.uuid4().hex
    headers = AUTHORIZED | {"traceparent": f"00-{trace_id}-{CALLER}-01"}
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=120, headers=headers) as client:
        answer = await client.post(CHAT, json=BODY | {"model": str(long_checkpoint())})
    assert answer.status_code == 200, answer.text

    async def all_are_there() -> bool:
        found = of_trace(trace_id)
        return is_whole(found) and [span["name"] for span in found.values()].count("llm_request") == 2

    await until(all_are_there, "vLLM's spans and all around them are there")
    trace = of_trace(trace_id)
    for stage in ("thinker", "talker"):
        (call,) = [key for key, span in trace.items() if span["name"] == f"replica_handle_request {stage} generate"]
        assert "llm_request" in {span["name"] for span in trace.values() if span["parent_id"] == call}
