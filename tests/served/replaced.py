"""Replicas that are replaced, and how it is seen."""

from __future__ import annotations

from typing import Any

from tests.http_app import MODEL
from tests.served.app import ServedApp, until

CHAT = "/v1/chat/completions"


REPLACED_S = 300
"""A new replica imports vLLM and starts an engine, while tests compute."""


NOTICED_S = 60
"""That a process is stopped, and ended: 10 to 15 s on a quiet host."""


def body(text_tokens: int, codes: int, **fields: Any) -> dict[str, Any]:
    lengths = {"thinker": text_tokens, "talker": codes}
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me."}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "wav"},
        "stage_sampling_params": {name: {"max_tokens": n, "min_tokens": n} for name, n in lengths.items()},
        **fields,
    }


async def process_ids(served: ServedApp) -> dict[str, int]:
    """Of the stages' replicas; each has one."""
    ids = {}
    for stage in served.stages:
        (status,) = await served.statuses_of(stage)
        ids[stage] = status["pid"]
    return ids


async def all_are_replaced(served: ServedApp, before: dict[str, int]) -> dict[str, int]:
    async def are_new() -> bool:
        try:
            return not set((await process_ids(served)).values()) & set(before.values())
        except Exception:  # while a stage has no replica, or one that is going
            return False

    await until(are_new, f"new replicas of {', '.join(before)}", REPLACED_S)
    return await process_ids(served)
