"""What an engine says step by step, also where the machine is too busy to read each step in time."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from vllm.v1.engine import async_llm
from vllm.v1.engine.output_processor import RequestOutputCollector


class OneByOne(RequestOutputCollector):
    """Gives each step's output by itself: vLLM's joins those that are not read in time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._later: deque[Any] = deque()

    def put(self, output: Any) -> None:
        if self.output is None or isinstance(output, Exception):
            super().put(output)
        else:
            self._later.append(output)

    async def get(self) -> Any:
        output = await super().get()
        self._put_next()
        return output

    def get_nowait(self) -> Any:
        output = super().get_nowait()
        self._put_next()
        return output

    def _put_next(self) -> None:
        if self._later and self.output is None:
            super().put(self._later.popleft())


def give_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on in the engines of this process, for requests that come."""
    monkeypatch.setattr(async_llm, "RequestOutputCollector", OneByOne)
