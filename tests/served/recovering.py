"""Streams in the midst of which something is killed, and what they must have said, of any family that speaks."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from tests.chaos.soak import nothing_is_left
from tests.http_app import PCM16_STEP
from tests.processes import family, running_after
from tests.served.app import AUTHORIZED, BASE_URL, ServedApp, scrape, until
from tests.server.samples import totals

CHAT = "/v1/chat/completions"
REPLACED_S = 300
ENDED_S = 30
"""Until the processes of a replica that was killed are gone: a moment, on a quiet host."""
READY_S = 2.0
"""A load balancer waits so long for `/ready`."""


@dataclass
class Heard:
    """What a client has of an answer."""

    text: str = ""
    pieces: list[bytes] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)

    def add(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.errors.append(event["error"])
        for choice in event.get("choices", ()):
            self.text += choice["delta"].get("content") or ""
            if data := (choice["delta"].get("audio") or {}).get("data"):
                self.pieces.append(base64.b64decode(data))

    @property
    def samples(self) -> np.ndarray:
        return np.frombuffer(b"".join(self.pieces), np.int16) / 32768


Kill = Callable[[ServedApp, str], Awaitable[None]]
Moment = Callable[[Heard], bool]


@dataclass
class Recovering:
    """An application with pairs of replicas, and what is asked of it.

    `lengths`: tokens of a long answer by stage, in the midst of which something is killed: each stage works for seconds
    once its moment has come. `short`: of one that is soon done. `tolerance`: of joined pieces, with a whole sound.
    """

    app: ServedApp
    lengths: Mapping[str, int]
    short: Mapping[str, int]
    voice: str
    tolerance: float
    _undisturbed: dict[str, Heard] = field(default_factory=dict)

    def body(self, content: Any = "Tell me a story.", **fields: Any) -> dict[str, Any]:
        return {
            "model": self.app.model,
            "messages": [{"role": "user", "content": content}],
            "modalities": ["text", "audio"],
            "audio": {"voice": self.voice, "format": "pcm16"},
            "seed": 7,
            "stage_sampling_params": {
                name: {"max_tokens": n, "min_tokens": n, "temperature": 0.8, "top_k": 20}
                for name, n in self.lengths.items()
            },
            **fields,
        }

    def short_body(self) -> dict[str, Any]:
        lengths = {name: {"max_tokens": n, "min_tokens": n} for name, n in self.short.items()}
        return self.body(stage_sampling_params=lengths)

    async def undisturbed(self, asked: dict[str, Any]) -> Heard:
        """The answer as it is when nothing dies: not streamed, as the reference makes it."""
        name = json.dumps(asked)
        if name not in self._undisturbed:
            async with httpx.AsyncClient(base_url=BASE_URL, timeout=REPLACED_S, headers=AUTHORIZED) as client:
                message = (await client.post(CHAT, json=asked)).json()["choices"][0]["message"]
            self._undisturbed[name] = Heard(message["content"], [base64.b64decode(message["audio"]["data"])])
        return self._undisturbed[name]

    def assert_same(self, heard: Heard, expected: Heard) -> None:
        assert not heard.errors
        assert heard.text == expected.text
        assert len(heard.samples) == len(expected.samples) > 0
        np.testing.assert_allclose(heard.samples, expected.samples, atol=self.tolerance + PCM16_STEP)

    async def are_there(self, stages: Collection[str]) -> None:
        """Two replicas of each of them, and one of any other stage: a lost one may still be replaced."""

        async def enough() -> bool:
            return all(
                [len(await self.app.living(stage)) >= (2 if stage in stages else 1) for stage in self.app.stages]
            )

        await until(enough, f"two replicas of {', '.join(stages)}", REPLACED_S)

    async def recoveries(self) -> dict[str, float]:
        counted = totals(await scrape())
        return {stage: counted["ingress_recovered_total", CHAT, stage] for stage in self.app.stages}

    async def requests_of(self, stage: str) -> dict[str, int]:
        """How many requests each replica of the stage has had."""
        return {status["replica_id"]: status["requests"] for status in await self.app.living(stage)}

    async def answer_with(self, asked: dict[str, Any], *kills: tuple[Moment, Kill, str]) -> Heard:
        """The answer, while something is killed when what was heard is as it says."""
        left, heard = list(kills), Heard()
        async with contextlib.aclosing(told(asked)) as all_heard:
            async for heard in all_heard:
                if left and left[0][0](heard):
                    _, kill, stage = left.pop(0)
                    await kill(self.app, stage)
        assert not left, "the answer ended before all was killed"
        return heard

    async def survives(self, asked: dict[str, Any], *kills: tuple[Moment, Kill, str]) -> dict[str, float]:
        """Recoveries by stage, of an answer that is the undisturbed one."""
        await self.are_there({stage for _, _, stage in kills if stage})
        expected = await self.undisturbed(asked)
        await until(lambda: nothing_is_left(self.app), "earlier requests are gone")
        before, stalled_s = await self.recoveries(), await stalls_s()
        self.assert_same(await self.answer_with(asked, *kills), expected)
        after = await self.recoveries()
        print(f"{[(kill.__name__, stage) for _, kill, stage in kills]}: stall {await stalls_s() - stalled_s:.3f} s")
        await until(lambda: nothing_is_left(self.app), "all replicas let go of the request")
        return {stage: after[stage] - before[stage] for stage in self.app.stages if after[stage] > before[stage]}


async def told(asked: dict[str, Any]) -> AsyncIterator[Heard]:
    """All that the client has, after each event."""
    heard = Heard()
    client = httpx.AsyncClient(base_url=BASE_URL, timeout=REPLACED_S, headers=AUTHORIZED)
    async with client, client.stream("POST", CHAT, json=asked | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                heard.add(json.loads(line.removeprefix("data: ")))
                yield heard


async def stalls_s() -> float:
    return totals(await scrape())["ingress_recovery_stall_seconds_sum", CHAT]


async def is_ready(app: ServedApp) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await asyncio.to_thread(app.client.get, "/ready")).status_code == 200
    return False


async def says_whether_it_is_ready() -> int:
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=READY_S, headers=AUTHORIZED) as client:
        return (await client.get("/ready")).status_code


async def at_work(app: ServedApp, stage: str) -> dict[str, Any]:
    """The status of the replica that has the only request there is."""
    found: list[dict[str, Any]] = []

    async def has_one() -> bool:
        found[:] = [status for status in await app.living(stage) if status["open_outboxes"]]
        return len(found) == 1

    await until(has_one, f"one replica of {stage} has the request")
    return found[0]


async def kill_replica(app: ServedApp, stage: str) -> None:
    """With all that it started, which is gone at once."""
    processes = family((await at_work(app, stage))["pid"])
    os.kill(processes[0].pid, signal.SIGKILL)
    stayed = await asyncio.to_thread(running_after, processes, ENDED_S)
    assert not stayed, f"a process of {stage} stayed: {stayed}"


async def until_made(app: ServedApp, stage: str) -> None:
    """The stage has made all of the request, and the others have not."""

    async def is_made() -> bool:
        return not (await at_work(app, stage))["engine"]["running"]

    await until(is_made, f"{stage} has made its part")


def text_begins(heard: Heard) -> bool:
    return bool(heard.text)


def much_text(heard: Heard) -> bool:
    return len(heard.text) > 40


def sound_begins(heard: Heard) -> bool:
    return bool(heard.pieces)


def much_sound(heard: Heard) -> bool:
    return len(heard.pieces) >= 3
