"""A soak: clients ask while processes end, and afterwards everything that was said and kept is looked at."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.chaos.breaker import INGRESS, REPLACED_S, SECOND_NODE, Breaker, are_doubled, replicas_of
from tests.chaos.cases import Case, cases, refused
from tests.chaos.clients import PATIENCE_S, Clients, Told, ask_whole
from tests.chaos.report import Leaks, Report, recoveries_in
from tests.cluster.served import BASE_URL, ROOT, STAGES, ServedApp, serve_run_over_nodes, until
from tests.cluster.test_app import KEPT, store_bytes
from tests.cluster.test_app_watchdog import family

ONE_PER_NODE = {"max_replicas_per_node": 1}
GONE_S = 30
"""Until a broken replica's processes are gone: one that is stopped is noticed after 10 to 15 s."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how many clients at once, how often a process is broken, and the seed of all choices."""

    seconds: float = 600.0
    clients: int = 16
    every_s: float = 15.0
    seed: int = 0


def soak(plan: Plan) -> Report:
    """Starts the application over two nodes, each with a replica of all stages and an ingress, and ends it."""
    with tempfile.TemporaryDirectory() as folder:
        config = yaml.safe_load((ROOT / "stage_configs" / "qwen2_5_omni_2x2_tiny.yaml").read_text())
        config["stages"][2]["num_replicas"] = 2
        for stage in config["stages"]:
            stage["placement"] = ONE_PER_NODE
        path = Path(folder) / "chaos.yaml"
        path.write_text(yaml.safe_dump(config | {"ingress_placement": ONE_PER_NODE}))
        with serve_run_over_nodes(f"config={path}", roles=("head", SECOND_NODE)) as app:
            report = asyncio.run(soaked(app, plan))
        return replace(report, recoveries=recoveries_in(app.printed))


async def soaked(app: ServedApp, plan: Plan) -> Report:
    """Of an application that runs with two replicas of each stage; says nothing of recoveries, which its log tells."""
    asked = cases()
    expected = await _undisturbed(asked)
    await until(lambda: nothing_is_left(app), "the undisturbed answers are gone")
    before = await asyncio.to_thread(Baseline.taken)
    breaker, until_s = Breaker(app, every_s=plan.every_s, seed=plan.seed), time.monotonic() + plan.seconds
    clients = Clients(BASE_URL, asked, refused(), expected, breaker.has_cut, seed=plan.seed)
    await asyncio.gather(clients.run(plan.clients, until_s), breaker.run(until_s))
    await until(_all_serve(before.deployments), "every deployment has its replicas again", REPLACED_S)
    leaks = await _leaks(app, breaker, before)
    return Report(plan.seed, plan.seconds, clients.outcomes, breaker.breaks, (), leaks)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What there is before anything is broken. `ingresses`: the memory of each, by process."""

    store_bytes: int
    ingresses: Mapping[int, int]

    @classmethod
    def taken(cls) -> Baseline:
        return cls(store_bytes(), {pid: _resident_bytes(pid) for pid in pids_of(INGRESS)})

    @property
    def deployments(self) -> Sequence[str]:
        """Those with two replicas."""
        return (*STAGES, INGRESS) if len(self.ingresses) > 1 else STAGES

    def growth_bytes(self) -> int:
        """Of the ingresses that were not ended."""
        alive = set(pids_of(INGRESS))
        return sum(_resident_bytes(pid) - before for pid, before in self.ingresses.items() if pid in alive)


async def _undisturbed(asked: Sequence[Case]) -> dict[str, Told]:
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=PATIENCE_S, trust_env=False) as http:
        told = await asyncio.gather(*(ask_whole(http, case) for case in asked))
    return {case.name: each for case, each in zip(asked, told, strict=True)}


def _all_serve(deployments: Sequence[str]) -> Callable[[], Awaitable[bool]]:
    return functools.partial(asyncio.to_thread, are_doubled, deployments)


async def _leaks(app: ServedApp, breaker: Breaker, before: Baseline) -> Leaks:
    with contextlib.suppress(AssertionError):  # the figures say what they hold
        await until(lambda: nothing_is_left(app), "the stages have let go of all requests")
        await until(lambda: nothing_is_stored_beyond(before.store_bytes), "the stores have what they had")
    statuses = await _living(app)
    of_living = {each.pid for status in statuses for each in family(status["pid"])}
    broken = [each for each in breaker.broken if each.pid not in of_living]  # a stopped one may have gone on
    _, alive = await asyncio.to_thread(psutil.wait_procs, broken, GONE_S)
    return Leaks(
        logs=sum(status["open_outboxes"] for status in statuses),
        of_engines={name: sum(status["engine"].get(name, 0) for status in statuses) for name in KEPT},
        store_bytes=max(0, store_bytes() - before.store_bytes),
        processes=len(alive),
        ingress_growth_bytes=await asyncio.to_thread(before.growth_bytes),
    )


async def nothing_is_left(app: ServedApp) -> bool:
    return all(
        status["open_outboxes"] == 0 and all(status["engine"].get(name, 0) == 0 for name in KEPT)
        for status in await _living(app)
    )


async def nothing_is_stored_beyond(num_bytes: int) -> bool:
    """Ray frees an object a moment after its last reader let go of it."""
    return await asyncio.to_thread(store_bytes) <= num_bytes


async def _living(app: ServedApp) -> list[dict[str, Any]]:
    return [status for stage in STAGES for status in await app.living(stage)]


def pids_of(deployment: str) -> list[int]:
    return [replica.pid for replica in replicas_of(deployment)]


def _resident_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)
