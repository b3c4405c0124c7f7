"""Requests that would wait too long for their first output."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from omni_cluster.config.limits import Limits
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.server.sojourn import LATEST, Sojourn, SojournBound
from tests.server.keyed import ONE, config_of
from tests.server.speaker import Face, face_of
from tests.server.streams import SPOKEN, begun


class Line:
    """A queue in order, on a clock of its own."""

    def __init__(self, most_s: float | None) -> None:
        self.now_s = 100.0
        self.bound = SojournBound(most_s, lambda: self.now_s)
        self.waits: list[Sojourn] = []

    def come(self, count: int = 1) -> None:
        self.waits += [self.bound.enter(self.now_s) for _ in range(count)]

    def serve(self, count: int, each_s: float) -> None:
        """The first ones get their first output, one after the other."""
        for _ in range(count):
            self.now_s += each_s
            self.waits.pop(0).end()


def test_a_burst_is_let_in_and_what_comes_behind_it_is_not() -> None:
    line = Line(most_s=1.0)
    line.come(100)  # nothing says yet how long they wait
    line.serve(2 * LATEST, 0.25)
    with pytest.raises(BadRequest, match="92 requests wait for their first output, and 4 a second get it") as refused:
        line.come()
    assert (refused.value.status, refused.value.retry_after_s) == (429, pytest.approx(23.0))
    line.serve(91, 0.25)
    line.come()  # one waits: a quarter of a second
    with pytest.raises(BadRequest):
        line.come()


def test_one_that_takes_long_by_itself_is_no_queue() -> None:
    line = Line(most_s=1.0)
    line.come()
    slow = line.waits.pop()
    for _ in range(10):
        line.come(5)
        line.serve(5, 0.125)
    slow.end()
    line.come(200)


def test_a_queue_that_was_empty_is_forgotten() -> None:
    line = Line(most_s=1.0)
    line.come(20)
    line.serve(20, 1.0)
    line.come(50)


def test_a_request_that_ends_waits_no_more() -> None:
    line = Line(most_s=1.0)
    line.come(10)
    line.serve(LATEST, 0.75)
    with pytest.raises(BadRequest):
        line.come()
    for wait in line.waits:
        wait.give_up()
        wait.end()  # too late to count
    assert line.bound.waiting == 0
    line.come()


def test_without_a_bound_all_are_let_in() -> None:
    line = Line(most_s=None)
    line.come(100)
    line.serve(50, 1.0)
    line.come(100)


@pytest.mark.usefixtures("tiny")
async def test_streams_of_sound_are_refused_while_text_is_not(tmp_path: Path) -> None:
    async with face_of(config_of(tmp_path, Limits(max_wait_s=1.0))) as face:
        face.speaker.may_speak.clear()
        streams = [asyncio.create_task(face.chat(ONE, stream=True, **SPOKEN)) for _ in range(LATEST)]
        await begun(face, LATEST)
        face.now_s += 1
        face.speaker.may_speak.set()
        await asyncio.gather(*streams)
        assert (await face.chat(ONE, stream=True, **SPOKEN)).status_code == 200  # nothing waits any more
        await _refused_behind_others(face)


async def _refused_behind_others(face: Face) -> None:
    line = face.server.admission.sojourns[True]
    waits = [line.enter(face.now_s) for _ in range(LATEST + 2)]
    for wait in waits[:LATEST]:
        face.now_s += 1
        wait.end()
    before = len(face.speaker.begun)
    refused = await face.chat(ONE, stream=True, **SPOKEN)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
    assert int(refused.headers["Retry-After"]) == 2
    assert len(face.speaker.begun) == before
    assert (await face.chat(ONE, stream=True)).status_code == 200
    for wait in waits[LATEST:]:
        wait.give_up()
    assert line.waiting == 0
