"""Who ends processes: every so often a replica, its engine, an ingress or a node is killed, or stopped for a while."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil
from ray import serve
from ray.util.state import list_actors

from tests.chaos.application import SECOND_NODE
from tests.processes import engine_of, family
from tests.served.app import STAGES, Nodes

Way = Literal["replica killed", "engine killed", "replica stopped", "engine stopped", "ingress killed", "node killed"]
WAYS: tuple[Way, ...] = (
    "replica killed",
    "engine killed",
    "replica killed",
    "engine stopped",
    "replica stopped",
    "replica killed",
    "engine killed",
    "replica stopped",
    "ingress killed",
    "node killed",
)
"""A deck of ways, dealt until it is empty and then shuffled again. A replica that is killed is the commonest; one break
in ten is a node's, where there are two."""
INGRESS = "ingress"
STOPPED_S = 20.0
LOOK_S = 0.5
REPLACED_S = 420.0
"""A new replica imports vLLM and starts an engine, while everything else computes."""


@dataclass(frozen=True, slots=True)
class Break:
    """What was done to whom, in seconds after the beginning. `waited_s`: until its replicas were all there."""

    at_s: float
    target: str
    way: Way
    waited_s: float


class Breaker:
    """Breaks a process every `every_s` seconds, of a deployment that has all its replicas.

    Where engines take longer to start than processes are broken, it waits for them: a stage that has lost one replica
    after another serves nobody, and tells nothing of recovery. `replicas`: how many each deployment has.
    """

    def __init__(self, nodes: Nodes | None, replicas: Mapping[str, int], *, every_s: float, seed: int) -> None:
        self._nodes = nodes
        self._replicas = replicas
        self._every_s = every_s
        self._chance = random.Random(f"breaker {seed}")
        self.breaks: list[Break] = []
        self.broken: list[psutil.Process] = []
        """All processes of replicas that were broken: none of them may stay."""
        self._stopped: set[asyncio.Task[None]] = set()
        self._ingress_broke_s = -math.inf

    async def run(self, until_s: float) -> None:
        began_s = time.monotonic()
        ways = dealt(possible_ways(self._replicas, has_second_node=self._nodes is not None), self._chance)
        next_s = began_s + self._every_s
        while next_s < until_s:
            await asyncio.sleep(next_s - time.monotonic())
            way = next(ways)
            target, deployments = self._target(way)
            due_s = time.monotonic()
            if not await self._has_all(deployments, until_s):
                break
            waited_s = time.monotonic() - due_s
            if await self._break(target, way):
                self.breaks.append(Break(due_s - began_s, target, way, waited_s))
            next_s = time.monotonic() + self._every_s
        await asyncio.gather(*self._stopped)

    def has_cut(self, since_s: float) -> bool:
        """Whether an ingress was ended since then, on the monotonic clock."""
        return self._ingress_broke_s >= since_s

    def _target(self, way: Way) -> tuple[str, Sequence[str]]:
        """Its name, and the deployments that lose a replica."""
        if way == "node killed":
            return SECOND_NODE, (*STAGES, INGRESS)
        target = INGRESS if way == "ingress killed" else self._chance.choice(STAGES)
        return target, (target,)

    async def _has_all(self, deployments: Sequence[str], until_s: float) -> bool:
        replicas = {deployment: self._replicas[deployment] for deployment in deployments}
        while not await asyncio.to_thread(all_serve, replicas):
            if time.monotonic() > until_s:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    async def _break(self, target: str, way: Way) -> bool:
        """False if there was nobody to break: the only one has ended by itself, and Serve does not know yet."""
        if way == "node killed":
            await self._break_node()
            return True
        replicas = await asyncio.to_thread(replicas_of, target)
        if not replicas:
            return False
        if target == INGRESS:
            self._ingress_broke_s = time.monotonic()
        self._break_replica(self._chance.choice(replicas).pid, way)
        return True

    async def _break_node(self) -> None:
        """Its raylet ends, and with it all of its processes; another node takes its place at once."""
        if (nodes := self._nodes) is None:
            raise ValueError("the application has one node alone")
        node_id = nodes.by_role[SECOND_NODE].node_id
        for deployment in (*STAGES, INGRESS):
            there = [each for each in await asyncio.to_thread(replicas_of, deployment) if each.node_id == node_id]
            for replica in there:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself
                    self.broken += family(replica.pid)
            if there and deployment == INGRESS:
                self._ingress_broke_s = time.monotonic()
        nodes.kill(SECOND_NODE)  # in this thread, though the loop stands still: Ray sets signal handlers
        nodes.add(SECOND_NODE)

    def _break_replica(self, pid: int, way: Way) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.broken += family(pid)
            target = psutil.Process(engine_of(pid) if way.startswith("engine") else pid)
            if way.endswith("killed"):
                target.kill()
                return
            target.send_signal(signal.SIGSTOP)
            self._stopped.add(asyncio.create_task(_continued(target)))


async def _continued(process: psutil.Process) -> None:
    """Lets a stopped process go on, unless it was ended meanwhile."""
    await asyncio.sleep(STOPPED_S)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)


def possible_ways(replicas: Mapping[str, int], *, has_second_node: bool) -> list[Way]:
    """A node is broken where there is another one, and an ingress too: without any, nobody could ask."""
    missing = set() if has_second_node else {"node killed"}
    if replicas[INGRESS] < 2:
        missing.add("ingress killed")
    return [way for way in WAYS if way not in missing]


def dealt(ways: Sequence[Way], chance: random.Random) -> Iterator[Way]:
    """Each of the ways once in an order of its own, and then again: a short soak leaves few of them out."""
    while True:
        yield from chance.sample(ways, len(ways))


def all_serve(replicas: Mapping[str, int]) -> bool:
    """Whether each deployment has as many healthy ones."""
    return all(serving(deployment) >= count for deployment, count in replicas.items())


def serving(deployment: str) -> int:
    """Replicas that Serve holds to be healthy."""
    states = serve.status().applications["default"].deployments[deployment].replica_states
    return sum(count for state, count in states.items() if state == "RUNNING")


@dataclass(frozen=True, slots=True)
class Replica:
    """Where it runs."""

    pid: int
    node_id: str


def replicas_of(deployment: str) -> list[Replica]:
    """Those whose process lives."""
    filters = [("class_name", "=", f"ServeReplica:default:{deployment}"), ("state", "=", "ALIVE")]
    return [Replica(actor.pid, actor.node_id) for actor in list_actors(filters=filters, detail=True) if actor.pid]
