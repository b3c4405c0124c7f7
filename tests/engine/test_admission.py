"""Who may speak beside those that are heard."""

from __future__ import annotations

import asyncio
import time

import pytest

from omni_cluster.engine.admission import EXPECTED_S, Admission
from omni_cluster.engine.round_cost import RoundCost
from omni_cluster.models.family import StepTime

PATIENCE_S = 60
STEPS, MAX_FRAMES = 9, 3_072


def cost(step_s: float | None = None) -> RoundCost:
    """Of nothing that was measured yet, or of a step."""
    made = RoundCost(STEPS, MAX_FRAMES)
    if step_s is not None:
        made.stepped(StepTime(72, step_s))
    return made


def admission(max_stall_s: float | None, step_s: float | None = None) -> Admission:
    return Admission(max_stall_s, cost(step_s), time.monotonic)


async def until_somebody_waits(door: Admission) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not door._turn.locked():
            await asyncio.sleep(0)


def nothing_is_left(door: Admission) -> bool:
    return not (door._players or door._expected or door._turn.locked())


async def test_a_round_costs_all_steps_of_a_piece_for_each_stream_and_one_pass() -> None:
    of = RoundCost(STEPS, max_frames=1_440)
    assert of.seconds(10) == pytest.approx(9 * (0.01 + 1.05e-5 * 720) + 4e-3 + 2.5e-5 * 720)
    assert of.seconds(40) == pytest.approx(9 * (2 * 0.01 + 1.05e-5 * 2_880) + 4e-3 + 2.5e-5 * 2_880)  # two steps each


async def test_a_round_is_learned_from_pieces_of_urgent_players_and_from_steps_and_passes() -> None:
    of, seen_s = cost(), [cost().seconds(4)]
    of.began(10_000, left_s=3.0)
    assert of.seconds(4) == seen_s[0]
    of.began(10_000, left_s=0.2)
    seen_s.append(of.seconds(4))
    of.finished(StepTime(720, 0.5))
    seen_s.append(of.seconds(4))
    of.stepped(StepTime(720, 0.5))
    assert seen_s == sorted(seen_s) and seen_s[0] < seen_s[1] < seen_s[2] < of.seconds(4)


async def test_as_many_are_let_in_as_are_expected_to_stand_still_no_longer_than_that() -> None:
    door = admission(max_stall_s=0.1)
    # 3 * (0.094 + 0.0086 n - 0.15) is 0.09 for 10 and 0.12 for 11
    assert [await door.admit(f"s{i}") for i in range(11)] == [True] * 10 + [False]
    assert door.urgent() == 10


async def test_slack_is_used_up_by_players_that_a_round_cannot_serve_in_time() -> None:
    # 0.094 + 0.0086 n is 0.15 for 6.5: so many can be served before what they have is heard
    door, of = admission(None), cost()
    assert of.streams_within(0.15) == 6 and of.seconds(6) <= 0.15 < of.seconds(7)
    assert (cost(step_s=1_000).streams_within(0.15), door.slack_use()) == (1, 0)
    with door.player("first"), door.player("second"), door.player("third"):
        assert door.slack_use() == 0.5


async def test_nobody_is_turned_away_without_a_limit_or_from_a_stage_that_makes_no_sound() -> None:
    free, slow = admission(None, step_s=1_000), admission(0, step_s=1_000)
    assert all([await free.admit(f"s{i}") for i in range(200)]) and nothing_is_left(free)
    assert await slow.admit("alone") and not await slow.admit("beside it")


async def test_a_player_with_sound_makes_room_for_who_waits() -> None:
    door = admission(max_stall_s=PATIENCE_S, step_s=1_000)
    with door.player("heard") as player:
        asked = asyncio.create_task(door.admit("new"))
        await until_somebody_waits(door)
        player.deliver(0.9, time.monotonic())
        await asyncio.sleep(0)
        assert not asked.done()
        player.deliver(PATIENCE_S, time.monotonic())
        assert await asyncio.wait_for(asked, PATIENCE_S) and door.urgent() == 1
        with door.player("new"):
            assert door.urgent() == 1  # it was expected, and is there
    assert nothing_is_left(door)


async def test_who_waits_is_let_in_in_turn_and_who_leaves_leaves_nothing() -> None:
    door, order = admission(max_stall_s=PATIENCE_S, step_s=1_000), list[str]()

    async def speak(name: str) -> None:
        assert await door.admit(name)
        with door.player(name):
            order.append(name)

    with door.player("first"):
        asked = [asyncio.create_task(speak(name)) for name in "abc"]
        await until_somebody_waits(door)
        asked[0].cancel()
        await asyncio.gather(asked[0], return_exceptions=True)
    await asyncio.wait_for(asyncio.gather(*asked[1:]), PATIENCE_S)
    assert order == ["b", "c"] and nothing_is_left(door)


async def test_a_stream_that_was_let_in_and_never_comes_is_forgotten() -> None:
    now_s = [5.0]
    door = Admission(0, cost(step_s=1_000), lambda: now_s[0])
    assert await door.admit("gone") and not await door.admit("next")
    now_s[0] += EXPECTED_S
    assert await door.admit("next") and door.urgent() == 1
