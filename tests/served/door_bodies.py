"""Bodies that the door holds to a deadline."""

from __future__ import annotations

from typing import Any

MODEL = "preset:tiny"


DEADLINE_S = 4
"""Of requests that take far longer."""


DEADLINE = {"x-request-timeout-seconds": str(DEADLINE_S)}


def body(**options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Tell me."}], **options}
