"""Admission's parts: slots, uploads, headers, and answers that many share."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from starlette.datastructures import Headers

from omni_cluster.config.limits import Limits
from omni_cluster.engine import deadline
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.server.admission import Admission, deadline_of
from omni_cluster.server.body import BASE_BYTES, Uploads
from omni_cluster.server.single_flight import SingleFlightCache
from omni_cluster.server.slots import AdmissionSlots

MIB = 1_048_576
PATIENCE_S = 60


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("ingresses", "each"), [(1, 10), (2, 5), (3, 4), (10, 1), (11, 1)])
async def test_ingresses_share_the_requests_that_run_at_once(ingresses: int, each: int) -> None:
    slots = Admission(Limits(max_ongoing_requests=10, max_queued_requests=0), ingresses).slots
    for _ in range(each):
        await slots.take()
    with pytest.raises(BadRequest, match=f"{each} requests run and 0 wait") as refused:
        await slots.take()
    assert refused.value.status == 429


async def test_who_waits_gets_a_place_in_turn_and_who_left_gets_none() -> None:
    slots, order = AdmissionSlots(1, 3), list[str]()

    async def worked(name: str) -> None:
        await slots.take()
        order.append(name)

    await slots.take()
    tasks = [asyncio.create_task(worked(name)) for name in "abc"]
    await settled()
    with pytest.raises(BadRequest):
        await slots.take()
    tasks[0].cancel()
    await settled()
    assert (slots.taken, slots.waiting) == (1, 2)
    slots.give_back()
    tasks[1].cancel()  # its slot has come already, and goes to the next
    await settled()
    assert order == ["c"] and slots.taken == 1
    slots.give_back()
    assert (slots.taken, slots.waiting) == (0, 0)


async def test_too_many_bytes_end_the_largest_upload_and_let_the_small_ones_in() -> None:
    uploads, ready = Uploads(2 * MIB), asyncio.Event()

    async def upload(size_bytes: int) -> None:
        async with uploads.open() as mine:
            uploads.grow(mine, size_bytes)
            await ready.wait()

    large, middle = (asyncio.create_task(upload(size)) for size in (MIB, MIB // 2))
    await settled()
    small = [asyncio.create_task(upload(0)) for _ in range(12)]
    await settled()
    assert large.done() and not middle.done() and not any(task.done() for task in small)
    with pytest.raises(BadRequest, match="largest of them") as refused:
        await large
    assert refused.value.status == 429
    assert uploads.size_bytes == MIB // 2 + 13 * BASE_BYTES
    ready.set()
    await asyncio.gather(middle, *small)
    assert uploads.size_bytes == 0


@pytest.mark.parametrize(("sent", "left_s"), [("20", 18.0), ("2", 1.6), ("0.6", 0.4), ("0.5", 0.3)])
def test_ours_comes_before_serve_s_own_deadline(monkeypatch: pytest.MonkeyPatch, sent: str, left_s: float) -> None:
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    assert deadline_of(Headers({"x-request-timeout-seconds": sent}), 600).left_s == pytest.approx(left_s)


@pytest.mark.parametrize("sent", ["0.49", "0.05", "1e-9"])
def test_a_deadline_that_serve_s_own_answer_could_come_before_is_refused(sent: str) -> None:
    with pytest.raises(BadRequest) as refused:
        deadline_of(Headers({"x-request-timeout-seconds": sent}), 600)
    assert (refused.value.status, refused.value.code) == (400, "invalid_value")
    assert refused.value.message == (
        f"The header x-request-timeout-seconds is '{sent}', but it should be one number of seconds, at least 0.5 and "
        "at most 600."
    )


def test_two_deadlines_are_none() -> None:
    raw = [(b"x-request-timeout-seconds", b"5"), (b"x-request-timeout-seconds", b"6")]
    with pytest.raises(BadRequest, match="'5, 6'"):
        deadline_of(Headers(raw=raw), 600)


async def test_what_is_costly_to_make_is_made_a_part_of_the_time_however_often_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, made = [0.0], 0
    monkeypatch.setattr("omni_cluster.server.single_flight._now_s", lambda: now_s[0])

    async def make() -> int:
        nonlocal made
        made += 1
        now_s[0] += 0.2
        return made

    shared = SingleFlightCache(make, fresh_s=60, fresh_times=9, wait_s=5)
    for _ in range(1000):
        await shared.get()
        now_s[0] += 0.1
    assert 0.2 * made == pytest.approx(now_s[0] / 10, rel=0.1)
    before = made
    now_s[0] += 2
    assert await shared.get() == await shared.get() == before + 1
    capped = SingleFlightCache(make, fresh_s=0.5, fresh_times=9, wait_s=5)
    of = await capped.get()
    now_s[0] += 0.2
    assert await capped.get() == of  # made 0.4 s ago
    now_s[0] += 0.2
    assert await capped.get() == of + 1


async def test_one_asks_for_all_who_wait_and_a_hung_answer_blocks_nobody() -> None:
    asked, hangs = 0, asyncio.Event()

    async def make() -> int:
        nonlocal asked
        asked += 1
        await hangs.wait()
        return asked

    shared = SingleFlightCache(make, fresh_s=60, wait_s=0.05)
    for _ in range(2):
        answers = await asyncio.gather(*[shared.get() for _ in range(20)], return_exceptions=True)
        assert {type(answer) for answer in answers} == {TimeoutError}
    shared._wait_s = PATIENCE_S
    hangs.set()
    assert await asyncio.gather(*[shared.get() for _ in range(20)]) == [1] * 20
    assert await shared.get() == 1 and asked == 1
    always = SingleFlightCache(make, wait_s=5)
    assert (await always.get(), await always.get()) == (2, 3)
    stale = SingleFlightCache(make, stale_s=60, wait_s=5)
    assert await stale.get() == 4
    hangs.clear()
    assert await stale.get() == 4 and await stale.get() == 4  # the next is being made, once
    await settled()
    assert asked == 5
    hangs.set()
