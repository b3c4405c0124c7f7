"""Requests that are at work while something is lost, of any family that speaks in three stages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tests.served.app import AUTHORIZED, BASE_URL, ServedApp, until

CHAT = "/v1/chat/completions"
ANSWERED_S = 400.0
"""A new replica starts meanwhile, beside others that compute."""


@dataclass(frozen=True)
class Asking:
    """Asks an application with one replica of each stage. `sampling`: of a spoken answer, whose codes are exactly as
    many as it says of the second stage.
    """

    app: ServedApp
    voice: str
    sampling: Mapping[str, Mapping[str, int]]

    def body(self, **options: Any) -> dict[str, Any]:
        return {
            "model": self.app.model,
            "messages": [{"role": "user", "content": "Tell me a long story."}],
            "modalities": ["text", "audio"],
            "audio": {"voice": self.voice, "format": "pcm16"},
            "stage_sampling_params": self.sampling,
            **options,
        }

    async def asked(self, **options: Any) -> httpx.Response:
        async with httpx.AsyncClient(base_url=BASE_URL, timeout=ANSWERED_S, headers=AUTHORIZED) as client:
            return await client.post(CHAT, json=self.body(**options))

    async def asked_in_text(self, **options: Any) -> httpx.Response:
        """By the first stage alone."""
        first, silent = self.app.stages[0], {"modalities": ["text"], "audio": None}
        of_first = {first: self.sampling[first]} if first in self.sampling else {}
        return await self.asked(stage_sampling_params=of_first, **silent, **options)

    def is_whole(self, answer: httpx.Response) -> bool:
        """An answer with all of its sound, as a stream or at once."""
        if answer.status_code != 200:
            return False
        if not answer.headers["content-type"].startswith("text/event-stream"):
            return self._has_all_codes(answer.json()["omni"])
        lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        timings = [said for line in lines if (said := json.loads(line.removeprefix("data: ")).get("omni"))]
        return answer.text.endswith("data: [DONE]\n\n") and self._has_all_codes(timings[-1])

    def _has_all_codes(self, timings: Mapping[str, Any]) -> bool:
        speaks = self.app.stages[1]
        return bool(timings["stages"][speaks]["tokens"] == self.sampling[speaks]["max_tokens"])

    async def at_work(self, *stream: bool) -> list[asyncio.Task[httpx.Response]]:
        """Requests that the second stage works on, and whether each is a stream."""
        speaks = self.app.stages[1]
        wanted = (await self.app.statuses_of(speaks))[0]["requests"] + len(stream)
        tasks = [asyncio.create_task(self.asked(stream=each)) for each in stream]

        async def all_came() -> bool:
            (status,) = await self.app.statuses_of(speaks)
            return bool(status["requests"] == wanted and status["engine"]["running"])

        await until(all_came, f"{speaks} has all of them")
        return tasks
