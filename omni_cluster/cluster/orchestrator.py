"""One request through the cluster, begun again on living replicas when one that works on it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence

from omni_cluster.cluster.loads import LOST_S, SILENT_S
from omni_cluster.cluster.parcel import Posted
from omni_cluster.cluster.run import Run, StageAccess
from omni_cluster.cluster.suspect import ASK_S, Suspect, all_are_up
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


class Orchestrator:
    """Holds what is known of requests that run, and never touches an embedding."""

    def __init__(self, bound: BoundPipeline, stages: Mapping[str, StageAccess]) -> None:
        self._bound = bound
        self._stages = stages

    async def stream(self, posted: Posted, deadline: Deadline) -> AsyncGenerator[StageEvent, None]:
        """Chunks of all stages that the request needs, as they are made; text does not wait for sound.

        Closing the iterator ends the request in every stage. When a replica is lost, the request is begun again in all
        stages that it still needs, and goes on where it was, at most `limits.max_restarts` times. Raises StageDied when
        it may not be begun again.
        """
        course = Course(self._bound, posted.request)
        while stages := course.stages_left():
            alone_on = await self._until_replicas_live(stages, course, deadline)
            with self._chosen_replicas(stages, course, alone_on) as chosen:
                choose_late = functools.partial(self._choose_late, course, chosen)
                run = Run(self._bound, self._stages, course.next_request(), posted, chosen, choose_late)
                try:
                    async with contextlib.aclosing(run.events(deadline)) as events:
                        async for event in events:
                            if (new := course.new(event)) is not None:
                                yield new
                except AnswerDiffers:
                    raise
                except StageDied as error:
                    loss = run.loss(error)
                    if not course.may_begin_again(self._note(loss, error)):
                        raise
                    # As a string: a log's record outlives the request, and an error has the frames it came through.
                    logger.warning("request %s is begun again: %s", run.request.request_id, str(error))
                    if not loss.replica_id and not loss.was_at_work:
                        async with deadline.kept():
                            await asyncio.sleep(REFUSED_S)

    async def _until_replicas_live(
        self, stages: Sequence[StageConfig], course: Course, deadline: Deadline
    ) -> Mapping[int, str]:
        """Returns the replicas that the request must have alone, by stage id. Raises DeadlineExceeded."""
        suspect = Suspect(course.next_request().request_id)
        async with deadline.kept():
            # Nothing is kept free while a stage has no replica, and one may be lost while others are asked.
            while True:
                alone = self._alone_in(stages, course)
                if (
                    self._can_choose(stages)
                    and (not alone or await all_are_up([self._calls(stage) for stage in stages]))
                    and await suspect.has_turn(alone)
                    and self._can_choose(stages)
                ):
                    return {stage_id: suspect.replicas[stage_id] for stage_id in alone if stage_id in suspect.replicas}
                await asyncio.sleep(ASK_S if alone else LOOK_S)

    def _alone_in(self, stages: Sequence[StageConfig], course: Course) -> Mapping[int, RemoteStage]:
        """The stages of which the request must have a replica alone. That others were lost too may be noticed late."""
        for stage in self._stages.values():
            course.others_lost(stage.calls.loads.lost_at_s())
        return {stage.stage_id: self._calls(stage) for stage in stages if course.must_be_alone_in(stage)}

    def _can_choose(self, stages: Sequence[StageConfig]) -> bool:
        return all(self._calls(stage).can_choose() for stage in stages)

    @contextlib.contextmanager
    def _chosen_replicas(
        self, stages: Sequence[StageConfig], course: Course, alone_on: Mapping[int, str]
    ) -> Iterator[dict[int, str | None]]:
        """A replica of each stage, which counts as busy with the request as long as the context is open."""
        chosen: dict[int, str | None] = {}
        for stage in stages:
            if (replica_id := alone_on.get(stage.stage_id)) is not None:
                self._calls(stage).loads.chosen(replica_id)
            chosen[stage.stage_id] = replica_id or self._choose_at_once(stage, course, chosen)
        try:
            yield chosen
        finally:
            for stage in stages:
                if (replica_id := chosen[stage.stage_id]) is not None:
                    self._calls(stage).loads.ended(replica_id)

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
        """The entry stage's replica by the conversation, whose earlier turns it has computed; the others' near to it.

        Rows of earlier turns that a replica has not are sent to it: that costs less than to be far away, or busy.
        `chosen`: the replicas of the stages before this one.
        """
        source = self._bound.source(stage)
        if source is None:
            return self._calls(stage).choose_replica(course.conversation)
        replica_id = chosen.get(source.stage_id)
        near = None if replica_id is None else self._calls(source).place_of(replica_id)
        return self._calls(stage).choose_replica(near=near)

    def _calls(self, stage: StageConfig) -> RemoteStage:
        return self._stages[stage.model_stage].calls

    def _note(self, loss: Loss, error: StageDied) -> Loss:
        """No other request is brought to what was lost."""
        if loss.stage in self._stages:
            rest_s = SILENT_S if isinstance(error, ReplicaSilent) else LOST_S
            self._stages[loss.stage].calls.loads.lost(loss.replica_id, rest_s)
        return loss
