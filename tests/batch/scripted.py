"""A server that answers as it was told."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from omni_cluster.batch.limits import BatchLimits

LIMITS = BatchLimits(rows_at_once=3, rows_a_block=2, patience_s=60)


ANSWER = {"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 3}}


class Scripted:
    """An application that refuses as it is told: no running one refuses when a test wants it.

    `together`: how many rows it has until it answers them.
    """

    def __init__(self, said: Callable[[int], Response], is_ready: bool = True, together: int = 1) -> None:
        self.asked: Counter[str] = Counter()
        self.most_at_once = self._now = 0
        self._said = said
        self._together = asyncio.Barrier(together)
        self._is_ready = is_ready

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await (await self._response(Request(scope, receive)))(scope, receive, send)

    async def _response(self, request: Request) -> Response:
        if request.url.path == "/v1/models":
            return JSONResponse({"data": [{"id": "scripted"}]})
        if request.url.path == "/ready":
            return Response(status_code=200 if self._is_ready else 503)
        row = json.loads(await request.body())["messages"]
        self.asked[row] += 1
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        await asyncio.sleep(0)
        await self._together.wait()
        self._now -= 1
        return self._said(self.asked[row])


def row(row_id: str) -> dict[str, Any]:
    return {"id": row_id, "messages": json.dumps(row_id)}
