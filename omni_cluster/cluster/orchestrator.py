"""One request through the cluster, begun again on living replicas when one that works on it is lost.

In each run the ingress asks a replica of each stage, and the stages pull from each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from ray.serve.handle import DeploymentHandle

from omni_cluster.cluster.consumer import ReplicaConnections
from omni_cluster.cluster.failures import named_failures
from omni_cluster.cluster.loads import LOST_COOLDOWN_S, SILENT_COOLDOWN_S
from omni_cluster.cluster.staged import StagedRequest
from omni_cluster.cluster.transport import ANSWER_S, RemoteStage, ReplicaSilent, Ticket, no_answer
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine.build import BoundPipeline
from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.fan_in import Emit, FanIn, Producer, StageEvent
from omni_cluster.engine.recovery import UNKNOWN, AnswerDiffers, Loss, RecoverableRequest
from omni_cluster.types.errors import RequestGone, StageDied
from omni_cluster.types.inputs import OmniRequest

logger = logging.getLogger("ray.serve")

REFUSED_S = 0.5
"""From a call that Serve had no replica for until the next one."""
LOOK_S = 0.05
"""Between two looks for a replica while a stage has none that lives."""
MOST_LOST = 1000
"""Lost replicas that are remembered."""
END_S = 10.0
"""How long a replica may take to end its call of a request that has its whole answer, until the call is cancelled."""
CAUSE_S = 2.0
"""How long to wait for the reason why a replica has ended a request: that another one was lost, or the client left."""


class Orchestrator:
    """Holds what is known of requests that run, and never touches an embedding."""

    def __init__(self, bound: BoundPipeline, stages: Mapping[str, StageAccess]) -> None:
        self._bound = bound
        self._stages = stages
        self._lost_at_s: dict[str, float] = {}
        """When requests lost each replica, on the monotonic clock."""

    async def stream(
        self, staging: AbstractAsyncContextManager[StagedRequest], deadline: Deadline
    ) -> AsyncGenerator[StageEvent, None]:
        """Chunks of all stages that the request needs, as they are made; text does not wait for sound.

        Closing the iterator ends the request in every stage. When a replica is lost, the request is begun again in all
        stages that it still needs, and goes on where it was, at most `limits.max_restarts` times. Raises StageDied when
        it may not be begun again.
        """
        async with staging as staged:
            recoverable = RecoverableRequest(self._bound, staged.request)
            while stages := recoverable.stages_left():
                await self._until_replicas_live(stages, deadline)
                with self._chosen_replicas(stages, recoverable) as chosen:
                    choose_late = functools.partial(self._choose_late, recoverable, chosen)
                    run = Run(self._bound, self._stages, recoverable.next_request(), staged, chosen, choose_late)
                    try:
                        async with contextlib.aclosing(run.events(deadline)) as events:
                            async for event in events:
                                if (new := recoverable.new(event)) is not None:
                                    yield new
                    except AnswerDiffers:
                        raise
                    except StageDied as error:
                        loss = run.loss(error)
                        self._note(loss, error)
                        if not recoverable.may_begin_again(loss, self._lost_at_s):
                            raise
                        # As a string: a log's record outlives the request, and an error has the frames it came through.
                        logger.warning("request %s is retried: %s", run.request.request_id, str(error))
                        await self._until_not_refused(loss, deadline)

    async def _until_not_refused(self, loss: Loss, deadline: Deadline) -> None:
        """Waits after a call that Serve had no replica for."""
        if not loss.replica_id and not loss.was_at_work:
            async with deadline.kept():
                await asyncio.sleep(REFUSED_S)

    async def _until_replicas_live(self, stages: Sequence[StageConfig], deadline: Deadline) -> None:
        """Raises DeadlineExceeded."""
        async with deadline.kept():
            while not all(self._calls(stage).can_choose() for stage in stages):
                await asyncio.sleep(LOOK_S)

    @contextlib.contextmanager
    def _chosen_replicas(
        self, stages: Sequence[StageConfig], recoverable: RecoverableRequest
    ) -> Iterator[dict[int, str | None]]:
        """A replica of each stage, which counts as busy with the request as long as the context is open."""
        chosen: dict[int, str | None] = {}
        for stage in stages:
            chosen[stage.stage_id] = self._choose_at_once(stage, recoverable, chosen)
        try:
            yield chosen
        finally:
            for stage in stages:
                if (replica_id := chosen[stage.stage_id]) is not None:
                    self._calls(stage).loads.on_end(replica_id)

    def _choose_at_once(
        self, stage: StageConfig, recoverable: RecoverableRequest, chosen: Mapping[int, str | None]
    ) -> str | None:
        """None for a stage whose source has no replica yet: its own is chosen when that has begun."""
        source = self._bound.source(stage)
        if source is not None and source.stage_id in chosen and chosen[source.stage_id] is None:
            return None
        return self._choose(stage, recoverable, chosen)

    async def _choose_late(
        self, recoverable: RecoverableRequest, chosen: dict[int, str | None], stage: StageConfig
    ) -> str | None:
        """For a stage whose source has begun: waits as long as all of its replicas are lost."""
        while not self._calls(stage).can_choose():
            await asyncio.sleep(LOOK_S)
        chosen[stage.stage_id] = self._choose(stage, recoverable, chosen)
        return chosen[stage.stage_id]

    def _choose(
        self, stage: StageConfig, recoverable: RecoverableRequest, chosen: Mapping[int, str | None]
    ) -> str | None:
        """The entry stage's replica by the conversation, whose earlier turns it has; others near to their source.

        Rows of earlier turns that a replica has not are sent to it: that costs less than to be far away, or busy.
        `chosen`: the replicas of the stages before this one.
        """
        source = self._bound.source(stage)
        if source is None:
            return self._calls(stage).choose_replica(recoverable.conversation)
        replica_id = chosen.get(source.stage_id)
        node = None if replica_id is None else self._calls(source).node_of(replica_id)
        return self._calls(stage).choose_replica(near_node=node)

    def _calls(self, stage: StageConfig) -> RemoteStage:
        return self._stages[stage.model_stage].calls

    def _note(self, loss: Loss, error: StageDied) -> None:
        """Puts the lost replica into cooldown. Silence is no loss to an event: the replica may answer again."""
        if loss.stage not in self._stages:
            return
        is_silent = isinstance(error, ReplicaSilent)
        cooldown_s = SILENT_COOLDOWN_S if is_silent else LOST_COOLDOWN_S
        self._stages[loss.stage].calls.loads.on_loss(loss.replica_id, cooldown_s)
        if not is_silent:
            self._remember(loss)

    def _remember(self, loss: Loss) -> None:
        self._lost_at_s.pop(loss.replica_id, None)  # the latest come last
        self._lost_at_s[loss.replica_id] = loss.at_s
        while len(self._lost_at_s) > MOST_LOST:
            del self._lost_at_s[next(iter(self._lost_at_s))]


@dataclass(frozen=True, slots=True)
class StageAccess:
    """A stage as the ingress sees it: it starts requests by `calls`, and reads what comes of them by `connections`."""

    calls: RemoteStage
    connections: ReplicaConnections
    _ending: set[asyncio.Task[None]] = field(default_factory=set)

    def end(self, call: AsyncGenerator[Ticket, None], ticket: Ticket) -> None:
        """Ends the call behind the answer. The replica does it, or Serve would count a request that failed."""
        # In a context of its own: Serve ends the calls that a request made when that request ends.
        task = asyncio.create_task(self._ended(call, ticket), context=contextvars.Context())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _ended(self, call: AsyncGenerator[Ticket, None], ticket: Ticket) -> None:
        async with contextlib.aclosing(call):
            with contextlib.suppress(StageDied, TimeoutError):
                async with asyncio.timeout(END_S):
                    if await self.connections.end(ticket):
                        await anext(call, None)


def stage_access(handle: DeploymentHandle, stage: StageConfig, config: PipelineConfig) -> StageAccess:
    calls = RemoteStage(handle, serving=stage.num_replicas if stage.standby_replicas else None)
    return StageAccess(calls, ReplicaConnections(calls, config.limits.max_payload_elements))


ChooseLate = Callable[[StageConfig], Awaitable[str | None]]
"""Chooses a replica of a stage whose source has begun; None: Serve chooses one."""


class Run:
    """A request in the replicas that were chosen for it, `chosen` by stage id.

    None for a stage that has none yet, and for those behind it: for them `choose_late` is asked when their source has
    begun, for what lived when the request came may be gone by then.
    """

    def __init__(
        self,
        bound: BoundPipeline,
        access: Mapping[str, StageAccess],
        request: OmniRequest,
        staged: StagedRequest,
        chosen: Mapping[int, str | None],
        choose_late: ChooseLate,
    ) -> None:
        self._bound = bound
        self._access = access
        self.request = request
        self._staged = staged
        self._choose_late = choose_late
        self._stages = [stage for stage in bound.stages_for(request) if stage.stage_id in chosen]
        self._tickets = {stage_id: _ticket(request, replica_id) for stage_id, replica_id in chosen.items()}
        self._taken: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        self._all_read = asyncio.Barrier(len(self._stages))
        """Stages end together: while one works, the others keep what it may need again."""
        self._at_work: set[str] = set()
        """Replicas that have taken the request."""

    def events(self, deadline: Deadline) -> AsyncGenerator[StageEvent, None]:
        """Chunks of all stages, as they are made. They begin with this call: read them, or close them.

        Closing the iterator ends the request in every stage: their streams stay open until then, for their consumers.
        Raises StageDied when a replica is gone; see `loss`.
        """
        fan_in = FanIn(deadline)
        for stage in self._stages:
            for produce in self._producers(stage):
                fan_in.add(functools.partial(_named, functools.partial(produce, stage)))
        return fan_in.events()

    def _producers(self, stage: StageConfig) -> Iterator[Callable[[StageConfig, Emit], Awaitable[None]]]:
        yield self._follow
        if not self.replica_of(stage) and self._access[stage.model_stage].calls.living() is None:
            yield self._wake
        if self._brings_media_to(stage):
            yield self._bring_media

    def loss(self, error: StageDied) -> Loss:
        """What the error says was lost."""
        for stage in self._stages:
            if error.replica_id and self.replica_of(stage) == error.replica_id:
                return Loss(stage.model_stage, error.replica_id, error.replica_id in self._at_work)
        was_taken = error.replica_id in self._at_work if error.replica_id else bool(self._at_work)
        return Loss(UNKNOWN, error.replica_id, was_at_work=was_taken or isinstance(error, RequestGone))

    def replica_of(self, stage: StageConfig) -> str:
        """The replica that works on the request, "" as long as Serve has not chosen one."""
        ticket = self._tickets[stage.stage_id]
        return ticket.result().replica_id if ticket.done() else ""

    def _request_for(self, stage: StageConfig) -> OmniRequest:
        is_entry = self._bound.source(stage) is None
        return self._staged.with_carried_media(self.request) if is_entry else self.request

    def _brings_media_to(self, stage: StageConfig) -> bool:
        return self._staged.has_stored_media and self._bound.source(stage) is None

    async def _follow(self, stage: StageConfig, emit: Emit) -> None:
        """Starts the stage once its source has given a ticket, and hands on what it says until it has finished."""
        async with cause_awaited():
            await self._read(stage, emit)

    async def _read(self, stage: StageConfig, emit: Emit) -> None:
        remote, upstream = self._access[stage.model_stage], await self._upstream(stage)
        replica_id, has_media = await self._chosen(stage), self._brings_media_to(stage)
        started = remote.calls.stream("generate", self._request_for(stage), upstream, has_media, replica_id=replica_id)
        async with contextlib.AsyncExitStack() as closing:
            call = await closing.enter_async_context(contextlib.aclosing(started))
            own = await _first(call, replica_id)
            self._at_work.add(own.replica_id)
            if not replica_id:
                self._tickets[stage.stage_id].set_result(own)
            if has_media:
                self._taken.set_result(own)
            async with contextlib.aclosing(remote.connections.read(own, with_rows=False)) as chunks:
                async for chunk in chunks:
                    await emit(StageEvent(stage.model_stage, chunk))
                    if chunk.finish_reason is not None:
                        break
            await self._all_read.wait()
            closing.pop_all()
            remote.end(call, own)

    async def _upstream(self, stage: StageConfig) -> Ticket | None:
        """The ticket of the source, once that has its own too: it begins no sooner, and is not waited for that long.

        None for a stage that needs none; see `RecoverableRequest.stages_left`.
        """
        source = self._bound.source(stage)
        if source is None or source.stage_id not in self._tickets:
            return None
        await self._upstream(source)
        return await asyncio.shield(self._tickets[source.stage_id])

    async def _chosen(self, stage: StageConfig) -> str:
        """The replica for the request, "" if Serve is to choose one."""
        ticket = self._tickets[stage.stage_id]
        if not ticket.done() and (replica_id := await self._choose_late(stage)) is not None:
            ticket.set_result(Ticket(self.request.request_id, replica_id))
        return self.replica_of(stage)

    async def _wake(self, stage: StageConfig, emit: Emit) -> None:
        """At once: the stage is asked to begin only when its source has begun, which may have to wake before."""
        await self._access[stage.model_stage].calls.wake()

    async def _bring_media(self, stage: StageConfig, emit: Emit) -> None:
        """Beside the reading of what the stage makes, which notices when the replica is gone."""
        async with cause_awaited():
            await self._staged.bring_media(self._access[stage.model_stage].calls, await self._taken)


async def _named(produce: Producer, emit: Emit) -> None:
    with named_failures():
        await produce(emit)


@contextlib.asynccontextmanager
async def cause_awaited() -> AsyncIterator[None]:
    """Delays RequestGone by `CAUSE_S`, so that the error that has its cause can surface first."""
    try:
        yield
    except RequestGone:
        await asyncio.sleep(CAUSE_S)
        raise


def _ticket(request: OmniRequest, replica_id: str | None) -> asyncio.Future[Ticket]:
    """Known at once if a replica was chosen, so that all stages start together; else the stage's answer gives it."""
    ticket: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
    if replica_id is not None:
        ticket.set_result(Ticket(request.request_id, replica_id))
    return ticket


async def _first(call: AsyncGenerator[Ticket, None], replica_id: str) -> Ticket:
    """The stage's ticket. ReplicaSilent when a replica that runs, as far as is known, gives none in time."""
    try:
        async with asyncio.timeout(ANSWER_S if replica_id else None):
            return await anext(call)
    except (TimeoutError, StopAsyncIteration):
        raise no_answer(replica_id, "did not take the request") from None
