"""A replica is kept free for one request: from when it is asked for until the request ends, or nobody asks any more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from omni_cluster.cluster import stage_deployment
from omni_cluster.cluster.parcel import Parcels
from omni_cluster.cluster.reservation import LEASE_S, SETTLE_S, Reservation, Turn
from omni_cluster.cluster.stage_deployment import StageReplica
from omni_cluster.cluster.suspect import ASK_S
from omni_cluster.config.loader import load_config
from omni_cluster.engine.build import bind
from omni_cluster.engine.metrics import StageMetrics
from omni_cluster.engine.output_log import OutputLog, OutputLogs
from omni_cluster.errors import StageDied
from omni_cluster.inputs import OmniRequest
from omni_cluster.models.registry import known_families
from omni_cluster.models.stage import Stage
from tests.cluster.clock import Clock

MOMENT_S = 0.01


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def logs() -> OutputLogs:
    return OutputLogs(1 << 20)


@pytest.fixture
def reservation(logs: OutputLogs, clock: Clock) -> Reservation:
    return Reservation(logs, clock)


def test_it_is_the_request_s_turn_once_all_others_are_gone(
    reservation: Reservation, logs: OutputLogs, clock: Clock
) -> None:
    runs, has_made_its_part = logs.open("runs"), logs.open("has made its part")
    has_made_its_part.close()
    assert not reservation.is_held
    assert reservation.ask("suspect") is Turn.BUSY and reservation.is_held
    clock.now_s = SETTLE_S
    assert reservation.ask("suspect") is Turn.BUSY
    runs.close()
    logs.remove("runs")
    assert reservation.ask("suspect") is Turn.BUSY  # a consumer may still need what the other one has made
    logs.remove("has made its part")
    assert reservation.ask("suspect") is Turn.FREE


def test_what_was_sent_by_ingresses_that_do_not_know_of_it_is_waited_for(
    reservation: Reservation, clock: Clock
) -> None:
    assert reservation.ask("suspect") is Turn.BUSY
    clock.now_s = SETTLE_S - MOMENT_S
    assert reservation.ask("suspect") is Turn.BUSY
    clock.now_s = SETTLE_S
    assert reservation.ask("suspect") is Turn.FREE


def test_one_request_has_it_at_a_time(reservation: Reservation, clock: Clock) -> None:
    reservation.ask("first")
    assert reservation.ask("second") is Turn.TAKEN
    clock.now_s = SETTLE_S
    assert reservation.ask("first") is Turn.FREE
    with reservation.used_by("first"):
        assert reservation.ask("second") is Turn.TAKEN
    assert reservation.ask("second") is Turn.BUSY


def test_it_ends_when_nobody_asks_any_more(reservation: Reservation, clock: Clock) -> None:
    """The client has left, the deadline has come, or the ingress or its connection is lost."""
    reservation.ask("suspect")
    clock.now_s = 3.0
    reservation.ask("suspect")
    clock.now_s = 3.0 + LEASE_S - MOMENT_S
    assert reservation.is_held and reservation.ask("other") is Turn.TAKEN
    clock.now_s = 3.0 + LEASE_S
    assert not reservation.is_held and reservation.ask("other") is Turn.BUSY


def test_whoever_wants_it_asks_often_enough() -> None:
    assert 10 * ASK_S < LEASE_S


@pytest.mark.parametrize("error", [None, RuntimeError, asyncio.CancelledError])
def test_a_request_has_it_until_it_ends_however_long_and_however_that_is(
    reservation: Reservation, clock: Clock, error: type[BaseException] | None
) -> None:
    reservation.ask("suspect")
    try:
        with reservation.used_by("suspect"):
            clock.now_s = 100 * LEASE_S
            assert reservation.is_held
            if error is not None:
                raise error
    except (RuntimeError, asyncio.CancelledError):
        pass
    assert not reservation.is_held


class Working(StageReplica):
    """A replica that has no engine, and makes nothing of a request until it is let go."""

    def __init__(self, logs: OutputLogs, reservation: Reservation) -> None:
        self._logs, self._reservation = logs, reservation
        self._requests, self._metrics, self._parcels = 0, StageMetrics(), Parcels()
        self._bound = bind(load_config(known_families=known_families()))
        self._stage = self._bound.config.stages[0]
        self.engine_error: StageDied | None = None
        self._engine = cast(Stage, SimpleNamespace(check_runs=self._check_runs))

    def _check_runs(self) -> None:
        if self.engine_error is not None:
            raise self.engine_error

    async def _fill(self, log: OutputLog, *_: Any) -> None:
        await asyncio.Event().wait()

    def __del__(self) -> None:
        """Nothing was started."""


async def test_a_stage_s_replica_is_kept_free_as_long_as_it_has_the_request(
    tiny: Path, reservation: Reservation, logs: OutputLogs, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_deployment, "own_replica_id", lambda: "own")
    replica = Working(logs, reservation)
    assert await replica.reserve("suspect") is Turn.BUSY
    begun = replica.generate(OmniRequest("suspect", "Hello."))
    await anext(begun)
    clock.now_s = 100 * LEASE_S
    assert reservation.is_held
    await begun.aclose()
    assert not reservation.is_held and len(logs) == 0


async def test_a_replica_whose_engine_is_dead_takes_no_request_and_is_kept_for_none(
    tiny: Path, reservation: Reservation, logs: OutputLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends a moment later; who was taken by it would count that as a loss."""
    monkeypatch.setattr(stage_deployment, "own_replica_id", lambda: "own")
    replica = Working(logs, reservation)
    replica.engine_error = StageDied("the engine of stage thinker died; send the request again.")
    with pytest.raises(StageDied, match="the engine of stage thinker died"):
        await replica.reserve("suspect")
    with pytest.raises(StageDied, match="the engine of stage thinker died"):
        await anext(replica.generate(OmniRequest("r", "Hello.")))
    assert replica.engine_error.replica_id == "own"
    assert not reservation.is_held and len(logs) == 0


def test_other_requests_do_not_end_it(reservation: Reservation) -> None:
    """Those that ran before it, and those that have no other replica."""
    with reservation.used_by("before"):
        assert not reservation.is_held
        reservation.ask("suspect")
    with reservation.used_by("other"):
        pass
    assert reservation.is_held and reservation.ask("other") is Turn.TAKEN


def test_a_request_that_begins_after_its_reservation_has_ended_does_not_take_another_s(
    reservation: Reservation, clock: Clock
) -> None:
    reservation.ask("late")
    clock.now_s = LEASE_S
    reservation.ask("suspect")
    with reservation.used_by("late"):
        pass
    assert reservation.is_held and reservation.ask("late") is Turn.TAKEN
