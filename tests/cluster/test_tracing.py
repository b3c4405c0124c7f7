"""One trace a request, over the proxy, the ingress and all stages, by Ray Serve's tracing."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ray

from tests.cluster.served import BASE_URL, STAGES, ServedApp, until

CHAT = "/v1/chat/completions"
BODY = {
    "model": "preset:tiny",
    "messages": [{"role": "user", "content": "Hello."}],
    "modalities": ["text", "audio"],
    "audio": {"voice": "Ethan", "format": "pcm16"},
    "sampling_params_list": [{"max_tokens": 8, "min_tokens": 8}, {"max_tokens": 30, "min_tokens": 30}, None],
    "stream": True,
}
CALLER = "00f067aa0ba902b7"
"""The span of the client that asks."""


def spans() -> Iterator[dict[str, Any]]:
    """What Serve's exporter wrote until now."""
    folder = Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve" / "spans"
    decoder = json.JSONDecoder()
    for file in folder.glob("*"):
        text = file.read_text()
        while text := text.lstrip():
            try:
                span, end = decoder.raw_decode(text)
            except ValueError:  # it is being written
                break
            yield span
            text = text[end:]


def of_trace(trace_id: str) -> dict[str, dict[str, Any]]:
    """By their ids."""
    found = (span for span in spans() if span["context"]["trace_id"] == f"0x{trace_id}")
    return {span["context"]["span_id"]: span for span in found}


def roots_of(trace: dict[str, dict[str, Any]]) -> set[str]:
    """Parents that are no spans of the trace."""
    return {span["parent_id"] for span in trace.values()} - set(trace)


def is_whole(trace: dict[str, dict[str, Any]]) -> bool:
    """The proxy, every stage, both hand-overs and all around them have said their spans.

    Each process writes its own: one that is within another may be there first.
    """
    names = [span["name"] for span in trace.values()]
    calls = {f"replica_handle_request {stage} generate" for stage in STAGES}
    is_complete = calls <= set(names) and names.count("handover") == 2 and "proxy_http_request" in " ".join(names)
    return is_complete and roots_of(trace) == {f"0x{CALLER}"}


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
