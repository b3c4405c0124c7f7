"""A request that may be what ends replicas finds a replica of each stage where nobody else is lost with it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from omni_cluster.cluster.loads import SILENT_S
from omni_cluster.cluster.reservation import Turn
from omni_cluster.cluster.transport import RemoteStage
from omni_cluster.errors import StageDied

ASK_S = 0.25
"""Between two times that it asks: often enough to begin soon, and to keep what it has been given."""


class Suspect:
    """One run of such a request, before it begins. Whoever gives it up just asks no more; see `Reservation`."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self.replicas: dict[int, str] = {}
        """Those that it has asked for, by stage id; none of a stage of which none is known here."""

    async def has_turn(self, stages: Mapping[int, RemoteStage]) -> bool:
        """Asks, or asks again, for a replica of each stage; whether all of them are free of others now.

        Stages are asked in their order, and none before those ahead of it have said yes: so of two suspects neither
        waits for what the other one has. None is asked while the only replica of a stage is at work: it may be so for
        long, and all others need what would be kept free meanwhile.
        """
        if not all(map(_may_be_asked, stages.values())):
            return False
        turns = []
        for stage_id, calls in stages.items():
            turns.append(await self._turn(stage_id, calls))
            if turns[-1] is Turn.TAKEN:
                return False
        return all(turn is Turn.FREE for turn in turns)

    async def _turn(self, stage_id: int, calls: RemoteStage) -> Turn:
        living = calls.living()
        asked_for = self.replicas.pop(stage_id, None)
        if living is None:
            return Turn.FREE
        if len(living) == 1:
            if not _may_be_asked(calls):
                return Turn.TAKEN
            self.replicas[stage_id] = living[0]
            return Turn.FREE
        replica_id = calls.loads.to_reserve(living, asked_for)
        if replica_id is None:
            return Turn.TAKEN
        try:
            turn = Turn(await calls.call("reserve", self._request_id, replica_id=replica_id))
        except StageDied:
            calls.loads.lost(replica_id, SILENT_S)
            return Turn.TAKEN
        calls.loads.reserved(replica_id)
        if turn is not Turn.TAKEN:
            self.replicas[stage_id] = replica_id
        return turn


async def all_are_up(stages: Sequence[RemoteStage]) -> bool:
    """Whether each stage has a replica; those that have none are woken, and waited for: what a suspect has asked for
    is not kept free for it until then.
    """
    for calls in stages:
        if calls.living() is None:
            with contextlib.suppress(StageDied):
                await calls.wake()
    return all(calls.living() for calls in stages)


def _may_be_asked(calls: RemoteStage) -> bool:
    """Whether the stage has several replicas, or one that is idle by chance: it is kept free for nobody."""
    living = calls.living()
    return living is None or len(living) > 1 or bool(calls.loads.living(living, idle=True))
