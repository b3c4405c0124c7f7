"""One request through the cluster, begun again on living replicas when one that works on it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence

from omni_cluster.cluster.loads import LOST_COOLDOWN_S, SILENT_COOLDOWN_S
from omni_cluster.cluster.run import Run, StageAccess
from omni_cluster.cluster.staged import StagedRequest
from omni_cluster.cluster.transport import RemoteStage, ReplicaSilent
from omni_cluster.config.schema import StageConfig
from omni_cluster.engine.build import BoundPipeline
from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.fan_in import StageEvent
from omni_cluster.engine.recovery import AnswerDiffers, Course, Loss
from omni_cluster.errors import StageDied

logger = logging.getLogger("ray.serve")

REFUSED_S = 0.5
"""From a call that Serve had no replica for until the next one."""
LOOK_S = 0.05
"""Between two looks for a replica while a stage has none that lives."""
MOST_LOST = 1000
"""Lost replicas that are remembered."""


class Orchestrator:
    """Holds what is known of requests that run, and never touches an embedding."""

    def __init__(self, bound: BoundPipeline, stages: Mapping[str, StageAccess]) -> None:
        self._bound = bound
        self._stages = stages
        self._lost_at_s: dict[str, float] = {}
        """When requests lost each replica, on the monotonic clock."""

    async def stream(self, staged: StagedRequest, deadline: Deadline) -> AsyncGenerator[StageEvent, None]:
        """Chunks of all stages that the request needs, as they are made; text does not wait for sound.

        Closing the iterator ends the request in every stage. When a replica is lost, the request is begun again in all
        stages that it still needs, and goes on where it was, at most `limits.max_restarts` times. Raises StageDied when
        it may not be begun again.
        """
        course = Course(self._bound, staged.request)
        while stages := course.stages_left():
            await self._until_replicas_live(stages, deadline)
            with self._chosen_replicas(stages, course) as chosen:
                choose_late = functools.partial(self._choose_late, course, chosen)
                run = Run(self._bound, self._stages, course.next_request(), staged, chosen, choose_late)
                try:
                    async with contextlib.aclosing(run.events(deadline)) as events:
                        async for event in events:
                            if (new := course.new(event)) is not None:
                                yield new
                except AnswerDiffers:
                    raise
                except StageDied as error:
                    loss = run.loss(error)
                    self._note(loss, error)
                    if not course.may_begin_again(loss, self._lost_at_s):
                        raise
                    # As a string: a log's record outlives the request, and an error has the frames it came through.
                    logger.warning("request %s is begun again: %s", run.request.request_id, str(error))
                    if not loss.replica_id and not loss.was_at_work:
                        async with deadline.kept():
                            await asyncio.sleep(REFUSED_S)

    async def _until_replicas_live(self, stages: Sequence[StageConfig], deadline: Deadline) -> None:
        """Raises DeadlineExceeded."""
        async with deadline.kept():
            while not self._can_choose(stages):
                await asyncio.sleep(LOOK_S)

    def _can_choose(self, stages: Sequence[StageConfig]) -> bool:
        return all(self._calls(stage).can_choose() for stage in stages)

    @contextlib.contextmanager
    def _chosen_replicas(self, stages: Sequence[StageConfig], course: Course) -> Iterator[dict[int, str | None]]:
        """A replica of each stage, which counts as busy with the request as long as the context is open."""
        chosen: dict[int, str | None] = {}
        for stage in stages:
            chosen[stage.stage_id] = self._choose_at_once(stage, course, chosen)
        try:
            yield chosen
        finally:
            for stage in stages:
                if (replica_id := chosen[stage.stage_id]) is not None:
                    self._calls(stage).loads.on_end(replica_id)

    def _choose_at_once(self, stage: StageConfig, course: Course, chosen: Mapping[int, str | None]) -> str | None:
        """None for a stage whose source has no replica yet: its own is chosen when that has begun."""
        source = self._bound.source(stage)
        if source is not None and source.stage_id in chosen and chosen[source.stage_id] is None:
            return None
        return self._choose(stage, course, chosen)

    async def _choose_late(self, course: Course, chosen: dict[int, str | None], stage: StageConfig) -> str | None:
        """For a stage whose source has begun: waits as long as all of its replicas are lost."""
        while not self._calls(stage).can_choose():
            await asyncio.sleep(LOOK_S)
        chosen[stage.stage_id] = self._choose(stage, course, chosen)
        return chosen[stage.stage_id]

    def _choose(self, stage: StageConfig, course: Course, chosen: Mapping[int, str | None]) -> str | None:
        """The entry stage's replica by the conversation, whose earlier turns it has; others near to their source.

        Rows of earlier turns that a replica has not are sent to it: that costs less than to be far away, or busy.
        `chosen`: the replicas of the stages before this one.
        """
        source = self._bound.source(stage)
        if source is None:
            return self._calls(stage).choose_replica(course.conversation)
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
