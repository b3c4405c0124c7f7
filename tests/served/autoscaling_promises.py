"""What is promised of replicas that follow a load: up to a node that is added, down and to sleep; nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest
from ray.exceptions import RayError

from tests.chaos.soak import nothing_is_left
from tests.served.app import ServedApp, scrape, until, whole_scrape
from tests.served.recovering import Heard, Recovering, told
from tests.server.samples import totals

CLIENTS, MOST = 12, 3
SCALED_S = 400
"""Until replicas that are needed run, or others have gone: two engines start on busy cores."""
PROMPT = "Count with me. " * 90
"""The second stage's work is the prompt, where there is an engine; there is little sound to make."""


@dataclass
class Load:
    """Clients that ask one request after another, as many at once as is said."""

    recovering: Recovering
    asked: Mapping[str, Any]
    expected: Heard
    first_sounds_s: list[float] = field(default_factory=list)
    """Of each answer, from when it was asked for."""
    lost: list[str] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _wanted: int = 0

    def be(self, clients: int) -> None:
        """Those that are too many finish what they have."""
        self._wanted = clients
        self._tasks = [task for task in self._tasks if not task.done()]
        for number in range(clients):
            if number >= len(self._tasks):
                self._tasks.append(asyncio.create_task(self._ask_on(number)))

    async def until_answered(self, more: int) -> None:
        wanted = len(self.first_sounds_s) + more

        async def are_there() -> bool:
            return bool(self.lost) or len(self.first_sounds_s) >= wanted

        await until(are_there, f"{more} answers more", SCALED_S)

    async def aclose(self) -> None:
        """Those that are there finish what they have: a later test is alone, after a failure too."""
        self._wanted = 0
        await asyncio.gather(*self._tasks)

    async def _ask_on(self, number: int) -> None:
        while number < self._wanted:
            try:
                await self._ask()
            except (httpx.HTTPError, AssertionError) as error:
                self.lost.append(f"{type(error).__name__}: {error}")

    async def _ask(self) -> None:
        began_s, first_sound_s, heard = time.monotonic(), None, Heard()
        async with contextlib.aclosing(told(dict(self.asked))) as all_heard:
            async for heard in all_heard:
                if heard.pieces and first_sound_s is None:
                    first_sound_s = time.monotonic() - began_s
        self.recovering.assert_same(heard, self.expected)
        assert first_sound_s is not None
        self.first_sounds_s.append(first_sound_s)


@dataclass
class Watched:
    """Clients and the replicas that run, over time."""

    began_s: float = field(default_factory=time.monotonic)
    changes: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        self.changes.append(f"{time.monotonic() - self.began_s:6.1f} s: {what}")

    async def watch(self, app: ServedApp) -> None:
        last = ""
        while True:
            counts = ", ".join([f"{stage} {len(await app.living(stage))}" for stage in app.stages])
            if counts != last:
                self.note(counts)
            last = counts
            await asyncio.sleep(1)


@contextlib.asynccontextmanager
async def watched(app: ServedApp) -> AsyncIterator[Watched]:
    seen = Watched()
    task = asyncio.create_task(seen.watch(app))
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until_running(app: ServedApp, stage: str, count: int) -> None:
    """So many, and none that starts or ends."""

    async def runs() -> bool:
        return len(await app.living(stage)) == count and await asyncio.to_thread(app.replicas, stage) == count

    await until(runs, f"{count} replicas of {stage}", SCALED_S)


async def until_wanted(app: ServedApp, stage: str, count: int) -> None:
    """Some of them wait for a node that has room."""

    async def are_wanted() -> bool:
        return await asyncio.to_thread(app.replicas, stage) == count

    await until(are_wanted, f"{count} replicas of {stage} are wanted", SCALED_S)


def add_node(app: ServedApp) -> None:
    assert app.nodes is not None
    app.nodes.add(app.stages[1])  # in the main thread, where Ray sets signal handlers


async def recoveries() -> float:
    return sum(count for (name, *_), count in totals(await scrape()).items() if name == "ingress_recovered_total")


async def another_controller(app: ServedApp) -> None:
    """Kills Serve's, and waits for the next."""
    app.actor("ServeController").kill()

    async def knows() -> bool:
        with contextlib.suppress(RayError):
            return await asyncio.to_thread(app.replicas, app.stages[1]) > 0
        return False

    await until(knows, "the next controller knows the replicas")


class AutoscalingPromises:
    """Of an application in three stages: one to `MOST` replicas of the second, by what they are expected to make still,
    and one of the third; both sleep when no request needs them. Not all of the second find room before there is another
    node.
    """

    @pytest.mark.timeout(1500)
    async def test_replicas_follow_a_load_that_comes_and_goes_and_no_request_is_lost(
        self, recovering: Recovering
    ) -> None:
        """Each has its answer, exactly, also while Serve's controller is killed, and while replicas are taken away. 99
        in 100 wait less for their sound than the replicas that are missing take to be there.
        """
        app, asked = recovering.app, recovering.body(PROMPT)
        second = app.stages[1]
        load = Load(recovering, asked, await recovering.undisturbed(asked))
        async with watched(app) as seen, contextlib.aclosing(load):
            load.be(1)
            await load.until_answered(3)
            await until_running(app, second, 1)
            load.be(CLIENTS)
            came_s = time.monotonic()
            seen.note(f"{CLIENTS} clients")
            await until_wanted(app, second, MOST)
            add_node(app)
            seen.note("another node")
            await until_running(app, second, MOST)
            grew_s = time.monotonic() - came_s
            assert len({status["node_id"] for status in await app.living(second)}) == 2
            await another_controller(app)
            seen.note("another controller")
            await load.until_answered(CLIENTS)
            load.be(1)
            seen.note("1 client")
            await until_running(app, second, 1)
        waited_s = load.first_sounds_s
        print(*seen.changes, sep="\n")
        print(f"{len(waited_s)} answers, {len(load.lost)} lost or different")
        print("first sound: p50 {:.2f} s, p99 {:.2f} s".format(*np.percentile(waited_s, [50, 99])))
        assert not load.lost
        assert await recoveries() == 0
        assert np.percentile(waited_s, 99) < grew_s

    @pytest.mark.timeout(900)
    async def test_stages_sleep_when_nobody_needs_them_and_the_host_is_ready(self, recovering: Recovering) -> None:
        app = recovering.app
        first, *sleepers = app.stages
        for stage in sleepers:
            await until_running(app, stage, 0)
        asleep = {"ready": True, "replicas": {first: 1, **dict.fromkeys(sleepers, 0)}, "asleep": sleepers}

        async def is_ready_with_them_asleep() -> bool:
            answer = await asyncio.to_thread(app.client.get, "/ready")
            assert answer.status_code == 200, answer.text
            return bool(answer.json() == asleep)

        await until(is_ready_with_them_asleep, "the ingress knows that they sleep")
        silent = recovering.body(modalities=["text"], audio=None, stage_sampling_params={})
        answer = await asyncio.to_thread(app.client.post, "/v1/chat/completions", json=silent)
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"], answer.text
        counted = totals(await whole_scrape())
        assert [counted["scrape_missing", stage] for stage in app.stages] == [0, 0, 0]
        assert [await asyncio.to_thread(app.replicas, stage) for stage in sleepers] == [0, 0]

    @pytest.mark.timeout(900)
    async def test_a_request_wakes_all_stages_that_it_needs_and_is_answered(self, recovering: Recovering) -> None:
        asked = recovering.body(PROMPT)
        woken = await recovering.answer_with(asked)
        recovering.assert_same(woken, await recovering.undisturbed(asked))
        await until(lambda: nothing_is_left(recovering.app), "all replicas let go of the requests")
