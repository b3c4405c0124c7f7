"""A soak: clients ask while processes end, and afterwards everything that was said and kept is looked at."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.chaos.application import CLIENTS, model_of, started
from tests.chaos.breaker import INGRESS, REPLACED_S, Breaker, all_serve, replicas_of, serving
from tests.chaos.cases import Case, cases, refused
from tests.chaos.clients import PATIENCE_S, Clients, ask_at_once
from tests.chaos.progress import Progress
from tests.chaos.report import Leaks, Report, recoveries_in
from tests.chaos.told import Told
from tests.processes import family, resident_bytes, running_after
from tests.served.app import BASE_URL, STAGES, ServedApp, until
from tests.served.leftovers import KEPT, store_bytes

GONE_S = 30
"""Until a broken replica's processes are gone: one that is stopped is noticed after 10 to 15 s."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how many clients at once, how often a process is broken, and the seed of all choices.

    `config`: a stage configuration to serve on one node, or over two with `cards_of_a_node` each, `checkpoint` in the
    place of its model. Without one the toy configuration is served over two.
    """

    seconds: float = 600.0
    clients: int = CLIENTS
    every_s: float = 15.0
    seed: int = 0
    config: Path | None = None
    checkpoint: Path | None = None
    cards_of_a_node: int = 0


def soak(plan: Plan, log: Path | None = None) -> Report:
    """Starts the application, and ends it. `log`: where to leave all that it printed."""
    app: ServedApp | None = None
    report: Report | None = None
    try:
        with started(plan.config, plan.checkpoint, plan.cards_of_a_node) as app:
            report = asyncio.run(soaked(app, plan))
    except AssertionError as error:
        if report is None:
            raise
        report = replace(report, faults=(*report.faults, f"the application did not end well: {error}"))
    finally:
        printed = app.printed if app is not None else ""
        if log is not None:
            log.write_text(printed)
    return replace(report, recoveries=recoveries_in(printed))


async def soaked(app: ServedApp, plan: Plan) -> Report:
    """Of an application that runs; says nothing of recoveries, which its log tells."""
    model = await asyncio.to_thread(model_of, app)
    asked = cases(model)
    expected = await _undisturbed(asked)
    say(f"{len(expected)} undisturbed answers")
    await until(lambda: nothing_is_left(app), "the undisturbed answers are gone")
    before = await asyncio.to_thread(Baseline.taken)
    breaker = Breaker(app.nodes, before.replicas, every_s=plan.every_s, seed=plan.seed)
    clients = Clients(BASE_URL, asked, refused(model), expected, breaker.has_cut, seed=plan.seed)
    progress = Progress(clients.outcomes, breaker.breaks, say)
    until_s = time.monotonic() + plan.seconds
    async with told(progress):
        await asyncio.gather(clients.run(plan.clients, until_s), breaker.run(until_s))
    say("all clients have gone; the replicas come back")
    faults = []
    try:
        await until(_all_serve(before.replicas), "every deployment has its replicas again", REPLACED_S)
    except AssertionError as error:  # what clients were told is worth a report all the same
        faults.append(str(error))
    leaks = await _leaks(app, breaker, before)
    return Report(plan.seed, plan.seconds, clients.outcomes, breaker.breaks, (), leaks, faults)


@contextlib.asynccontextmanager
async def told(progress: Progress) -> AsyncIterator[None]:
    """While the block runs, and once more behind it."""
    telling = asyncio.create_task(progress.run())
    try:
        yield
    finally:
        telling.cancel()
        progress.tell()


def say(line: str) -> None:
    print(line, flush=True)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What there is before anything is broken. `replicas`: of each deployment; `ingresses`: the memory of each, by
    process.
    """

    store_bytes: int
    replicas: Mapping[str, int]
    ingresses: Mapping[int, int]

    @classmethod
    def taken(cls) -> Baseline:
        replicas = {deployment: serving(deployment) for deployment in (*STAGES, INGRESS)}
        return cls(store_bytes(), replicas, {pid: _resident_bytes(pid) for pid in pids_of(INGRESS)})

    def growth_bytes(self) -> int:
        """Of the ingresses that were not ended."""
        alive = set(pids_of(INGRESS))
        return sum(_resident_bytes(pid) - before for pid, before in self.ingresses.items() if pid in alive)


async def _undisturbed(asked: Sequence[Case]) -> dict[str, Told]:
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=PATIENCE_S, trust_env=False) as http:
        told = await asyncio.gather(*(ask_at_once(http, case) for case in asked))
    return {case.name: each for case, each in zip(asked, told, strict=True)}


def _all_serve(replicas: Mapping[str, int]) -> Callable[[], Awaitable[bool]]:
    return functools.partial(asyncio.to_thread, all_serve, replicas)


async def _leaks(app: ServedApp, breaker: Breaker, before: Baseline) -> Leaks:
    with contextlib.suppress(AssertionError):  # the figures say what they hold
        await until(lambda: nothing_is_left(app), "the stages have let go of all requests")
        await until(lambda: nothing_is_stored_beyond(before.store_bytes), "the stores have what they had")
    statuses = await _living(app)
    of_living = {pid for status in statuses for pid in _family_pids(status["pid"])}
    broken = [each for each in breaker.broken if each.pid not in of_living]  # a stopped one may have gone on
    alive = await asyncio.to_thread(running_after, broken, GONE_S)
    return Leaks(
        logs=sum(status["open_outboxes"] for status in statuses),
        of_engines={name: sum(status["engine"].get(name, 0) for status in statuses) for name in KEPT},
        store_bytes=max(0, store_bytes() - before.store_bytes),
        processes=len(alive),
        ingress_growth_bytes=await asyncio.to_thread(before.growth_bytes),
    )


def _family_pids(pid: int) -> list[int]:
    """None of a replica that has ended since it answered."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [each.pid for each in family(pid)]
    return []


async def nothing_is_left(app: ServedApp) -> bool:
    return all(
        status["open_outboxes"] == 0 and all(status["engine"].get(name, 0) == 0 for name in KEPT)
        for status in await _living(app)
    )


async def nothing_is_stored_beyond(num_bytes: int) -> bool:
    """Ray frees an object a moment after its last reader let go of it."""
    return await asyncio.to_thread(store_bytes) <= num_bytes


async def _living(app: ServedApp) -> list[dict[str, Any]]:
    return [status for stage in app.stages for status in await app.living(stage)]


def pids_of(deployment: str) -> list[int]:
    return [replica.pid for replica in replicas_of(deployment)]


def _resident_bytes(pid: int) -> int:
    """Nothing of one that has ended since it was listed."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return resident_bytes(psutil.Process(pid))
    return 0
