"""Stand-ins for the replicas of three stages, and an ingress's orchestrator over them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

from omni_cluster.cluster.failures import lost_with
from omni_cluster.cluster.loads import Loads
from omni_cluster.cluster.orchestrator import Orchestrator, StageAccess
from omni_cluster.cluster.staged import StagedRequest
from omni_cluster.cluster.transport import RemoteStage, Ticket
from omni_cluster.config.loader import load_config
from omni_cluster.engine.build import BoundPipeline, bind
from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.fan_in import StageEvent
from omni_cluster.engine.output_log import OutputLogs
from omni_cluster.models.registry import known_families
from omni_cluster.types.errors import StageDied
from omni_cluster.types.inputs import Media, OmniRequest
from omni_cluster.types.outputs import StageChunk
from tests.configs import TINY_CONFIG

STAGES = ("thinker", "talker", "code2wav")
ANSWER = (1, 2, 3, 4, 5, 6)
CHUNKS = (StageChunk(0, ANSWER[:3], "abc"), StageChunk(3, ANSWER[3:], "def", finish_reason="stop"))

Breaks = Callable[[str, Ticket], Exception | None]
"""What breaks once `Stage.breaks_after` chunks of the answer were read, if anything: by stage, and where it is read."""


class Stage:
    """Replicas of a stage, calls of them, and what is read from them: an answer of six tokens."""

    def __init__(self, name: str, breaks: Breaks, *, replicas: tuple[str, ...] = ()) -> None:
        self.loads = Loads()
        self.replicas = list(replicas or (f"{name}-0", f"{name}-1"))
        self.said: list[tuple[str, str]] = []
        self.requests: list[OmniRequest] = []
        self.ran_on: list[str] = []
        self.asked_near: list[str | None] = []
        self.woken = asyncio.Event()
        self.gone: set[str] = set()
        """Replicas that are gone, and still listed."""
        self.breaks_after = 1
        self.done: list[str] = []
        """Requests whose calls ended by themselves."""
        self._ends: dict[str, asyncio.Event] = {}
        self._logs: dict[str, OutputLogs] = {}
        self._name, self._breaks = name, breaks

    def living(self) -> list[str] | None:
        return self.loads.living(self.replicas) if self.replicas else None

    def can_choose(self) -> bool:
        return self.living() != []

    async def until_none_lives(self) -> None:
        """Waits as long as there is a replica for a request."""
        while self.can_choose():
            await asyncio.sleep(0)

    def choose_replica(self, conversation: bytes = b"", near_node: str | None = None) -> str | None:
        self.asked_near.append(near_node)
        living = self.living()
        return None if living is None else self.loads.choose(living, conversation)

    def node_of(self, replica_id: str) -> str:
        return f"node of {replica_id}"

    async def wake(self) -> None:
        """Its replica is up when the test says so."""
        self.said.append(("wake", ""))
        await self.woken.wait()

    async def call(self, method: str, *args: Any, replica_id: str, wait_s: float | None = None) -> bool:
        assert replica_id in self.replicas and (wait_s is None or wait_s > 0.5)
        self.said.append((method, args[0]))
        return True

    async def stream(self, method: str, request: OmniRequest, *_: Any, replica_id: str) -> AsyncGenerator[Any, None]:
        self.said.append((method, request.request_id))
        if not replica_id:
            await self.woken.wait()
            replica_id = "woken"
        if replica_id in self.gone:
            raise lost_with(StageDied("gone"), replica_id)
        self.requests.append(request)
        self.ran_on.append(replica_id)
        logs = self._logs.setdefault(replica_id, OutputLogs(1 << 20))
        logs.open(request.request_id)
        try:
            yield Ticket(request.request_id, replica_id)
            await self._end_of(request.request_id).wait()
            self.done.append(request.request_id)
        finally:
            self._ends.pop(request.request_id, None)
            logs.remove(request.request_id)

    def _end_of(self, request_id: str) -> asyncio.Event:
        return self._ends.setdefault(request_id, asyncio.Event())

    async def end(self, ticket: Ticket) -> bool:
        self._end_of(ticket.request_id).set()
        return True

    def works_on(self, replica_id: str) -> int:
        return len(self._logs.get(replica_id, ()))

    async def read(self, ticket: Ticket, *, with_rows: bool) -> AsyncGenerator[StageChunk, None]:
        for number, chunk in enumerate(CHUNKS):
            if number == self.breaks_after and (error := self._breaks(self._name, ticket)) is not None:
                raise error
            yield chunk
            await asyncio.sleep(0)
        if self.breaks_after == len(CHUNKS) and (error := self._breaks(self._name, ticket)) is not None:
            raise error

    @property
    def is_free(self) -> bool:
        return not any(load.own for load in self.loads._by_replica.values())


class Cluster:
    """Three stages, and an ingress's orchestrator over them."""

    def __init__(self, breaks: Breaks = lambda *_: None, *, talkers: tuple[str, ...] = (), **limits: Any) -> None:
        self.stages = {name: Stage(name, breaks, replicas=talkers if name == "talker" else ()) for name in STAGES}
        self.orchestrator = Orchestrator(
            bound(**limits),
            {name: StageAccess(cast(RemoteStage, each), cast(Any, each)) for name, each in self.stages.items()},
        )

    async def ask(self, deadline_s: float = 60, **fields: Any) -> list[StageEvent]:
        """All events of a request."""
        return [event async for event in self.events(deadline_s, **fields)]

    async def events(
        self, deadline_s: float = 60, carried: Media | None = None, **fields: Any
    ) -> AsyncGenerator[StageEvent, None]:
        sent = StagedRequest(OmniRequest("r", "Hello.", **fields), carried=carried)
        async with contextlib.aclosing(
            self.orchestrator.stream(contextlib.nullcontext(sent), Deadline(deadline_s))
        ) as events:
            async for event in events:
                yield event
        assert all(each.is_free for each in self.stages.values())


def bound(**limits: Any) -> BoundPipeline:
    config = load_config(TINY_CONFIG, known_families=known_families())
    return bind(config.model_copy(update={"limits": config.limits.model_copy(update=limits)}))


def tokens_of(events: list[StageEvent], stage: str) -> tuple[int, ...]:
    return tuple(token for event in events if event.stage == stage for token in event.chunk.token_ids)


def recovered_from(events: list[StageEvent]) -> list[tuple[str, ...]]:
    return [event.recovery.stages for event in events if event.recovery is not None]


def once(stage: str, replica_ids: set[str] | None = None, kind: type[StageDied] = StageDied) -> Breaks:
    """The stage is lost once with each of its replicas of these ids; None: with the first that it runs on."""

    def breaks(name: str, ticket: Ticket) -> Exception | None:
        nonlocal replica_ids
        if name != stage:
            return None
        replica_ids = {ticket.replica_id} if replica_ids is None else replica_ids
        if ticket.replica_id not in replica_ids:
            return None
        replica_ids = replica_ids - {ticket.replica_id}
        return lost_with(kind("gone"), ticket.replica_id)

    return breaks
