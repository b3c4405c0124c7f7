"""Before a request begins anywhere, the replica that would speak is asked."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest

from omni_cluster.cluster.loads import Loads
from omni_cluster.cluster.orchestrator import Orchestrator, StageAccess
from omni_cluster.cluster.parcel import posted
from omni_cluster.cluster.transport import RemoteStage
from omni_cluster.config.loader import load_config
from omni_cluster.engine.build import BoundPipeline, bind
from omni_cluster.engine.deadline import Deadline
from omni_cluster.errors import StageDied, TooManyVoices
from omni_cluster.inputs import OmniRequest
from omni_cluster.models.registry import known_families

STAGES = ("thinker", "talker", "code2wav")


class Calls:
    """Two replicas of a stage, which answer `admit` as told, and start nothing."""

    def __init__(self, answer: bool) -> None:
        self.loads = Loads()
        self.said: list[tuple[str, str]] = []
        self._answer = answer

    def choose_replica(self, conversation: bytes = b"") -> str | None:
        return self.loads.choose(["one", "other"], conversation)

    async def call(self, method: str, *args: Any, replica_id: str, wait_s: float) -> bool:
        assert replica_id in ("one", "other") and wait_s > 0.5
        self.said.append((method, args[0]))
        return self._answer

    async def stream(self, method: str, request: OmniRequest, *_: Any, replica_id: str) -> AsyncGenerator[Any, None]:
        self.said.append((method, request.request_id))
        raise StageDied("it starts nothing")
        yield

    @property
    def is_free(self) -> bool:
        return not any(load.own for load in self.loads._by_replica.values())


def bound(max_stall_s: float | None) -> BoundPipeline:
    config = load_config(known_families=known_families())
    limits = config.limits.model_copy(update={"max_stall_s": max_stall_s})
    return bind(config.model_copy(update={"limits": limits}))


async def asked(answer: bool, max_stall_s: float | None, **fields: Any) -> tuple[dict[str, Calls], Exception]:
    """What each stage was asked, and how the request ended."""
    calls = {name: Calls(answer) for name in STAGES}
    stages = {name: StageAccess(cast(RemoteStage, each), cast(Any, None)) for name, each in calls.items()}
    sent = await posted(OmniRequest("r", "Hello.", **fields))
    with pytest.raises((TooManyVoices, StageDied)) as ended:
        async with contextlib.aclosing(Orchestrator(bound(max_stall_s), stages).stream(sent, Deadline(60))) as events:
            async for _ in events:
                pass
    assert all(each.is_free for each in calls.values())
    return calls, ended.value


async def test_a_stream_that_the_speaking_replica_refuses_begins_nowhere(tiny: Path) -> None:
    calls, error = await asked(False, 0.5, streams_audio=True)
    assert isinstance(error, TooManyVoices) and "limits.max_stall_s = 0.5 s" in str(error)
    assert [each.said for each in calls.values()] == [[], [], [("admit", "r")]]


async def test_a_stream_that_it_lets_in_begins(tiny: Path) -> None:
    calls, error = await asked(True, 0.5, streams_audio=True)
    assert isinstance(error, StageDied) and calls["code2wav"].said[0] == ("admit", "r")
    assert ("generate", "r") in calls["thinker"].said


@pytest.mark.parametrize(
    ("max_stall_s", "fields"),
    [(None, {"streams_audio": True}), (0.5, {"streams_audio": False}), (0.5, {"wants_audio": False})],
)
async def test_only_streams_of_sound_are_asked_for_and_only_with_a_limit(
    tiny: Path, max_stall_s: float | None, fields: dict[str, bool]
) -> None:
    calls, error = await asked(False, max_stall_s, **fields)
    assert isinstance(error, StageDied)
    assert all(method == "generate" for each in calls.values() for method, _ in each.said)
