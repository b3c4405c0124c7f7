"""One trace a request, over the proxy, the ingress and all stages, by Ray Serve's tracing."""

from __future__ import annotations

import uuid
from typing import Any

import httpx
import pytest

from tests.served.app import BASE_URL, ServedApp, until
from tests.served.traces import BODY, CALLER, CHAT, is_whole, of_trace, roots_of, spans

pytestmark = pytest.mark.full


async def ask(client: httpx.AsyncClient, **headers: str) -> None:
    assert (await client.post(CHAT, json=BODY, headers=headers)).status_code == 200


async def test_a_traced_request_is_one_trace_over_all_stages_and_others_are_none(served: ServedApp) -> None:
    trace_id = uuid.uuid4().hex
    traces_before = {span["context"]["trace_id"] for span in spans()}
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=120) as client:
        await ask(client)
        await ask(client, traceparent=f"00-{trace_id}-{CALLER}-01")

    async def all_have_ended() -> bool:
        return is_whole(of_trace(trace_id))

    await until(all_have_ended, "all spans of the trace are there")
    trace = of_trace(trace_id)

    def ancestors(span: dict[str, Any]) -> list[str]:
        parent = trace.get(span["parent_id"])
        return [] if parent is None else [parent["name"], *ancestors(parent)]

    handovers = [span for span in trace.values() if span["name"] == "handover"]
    assert {ancestors(span)[0].split()[1] for span in handovers} == {"talker", "code2wav"}
    assert all(any(name.split()[1:2] == ["ingress"] for name in ancestors(span)) for span in handovers)
    assert all(span["attributes"]["chunks"] >= 1 for span in handovers)
    assert roots_of(trace) == {f"0x{CALLER}"}
    assert {span["context"]["trace_id"] for span in spans()} - traces_before == {f"0x{trace_id}"}
