"""Traces of requests, as they are written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from tests.served.app import STAGES

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
