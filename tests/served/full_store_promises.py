"""What is promised where Ray's object store of a node is full, and the disk that Ray moves objects to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import ray
from ray.exceptions import OutOfDiskError

from tests.http_app import nothing_is_left
from tests.served.app import ServedApp, until
from tests.served.at_work import Asking
from tests.served.leftovers import store_bytes
from tests.served.media_bodies import QUESTION, picture
from tests.served.replaced import process_ids

SMALLEST_BYTES = 64 << 10
"""Less than what Ray gives away without its store."""
MARKS_BYTES = 100
"""Ray leaves 2 bytes in a store for each object that found no room there as it was asked for."""
A_LONG_PROMPT = [{"role": "user", "content": "word " * 6000}]

LARGE: list[Any] = [{"role": "user", "content": [picture(960, 760, "JPEG"), QUESTION]}]
SMALL: list[Any] = [{"role": "user", "content": [picture(960, 760, "JPEG", plain=True), QUESTION]}]
"""A file of few bytes, but many pixels."""
CARRIED: list[Any] = [{"role": "user", "content": [picture(640, 480, "JPEG", plain=True), QUESTION]}]
"""Its pixels travel with the request."""


@ray.remote(num_cpus=0)
class Filler:
    """Fills the store of its node."""

    def __init__(self) -> None:
        self._kept: list[ray.ObjectRef] = []

    def fill(self) -> None:
        num_bytes = 64 << 20
        while num_bytes >= SMALLEST_BYTES:
            try:
                self._kept.append(ray.put(np.zeros(num_bytes, np.uint8)))
            except OutOfDiskError:
                num_bytes //= 2


@asynccontextmanager
async def full_store(role: str) -> AsyncIterator[None]:
    """The store of that node has no room, as long as the context is open."""
    before = store_bytes()
    filler = Filler.options(label_selector={"role": role}).remote()
    try:
        await filler.fill.remote()
        yield
    finally:
        ray.kill(filler)

        async def is_freed() -> bool:
            return store_bytes() <= before + MARKS_BYTES

        await until(is_freed, "the store has its room again", seen=lambda: f": {store_bytes()} bytes, {before} before")


def is_refused(answer: httpx.Response) -> bool:
    return answer.status_code == 503 and answer.json()["error"]["code"] == "store_full"


def is_cut_short(answer: httpx.Response) -> bool:
    """A stream that had begun: its last word is why it ends."""
    said = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return answer.status_code == 200 and json.loads(said[-1])["error"]["code"] == "store_full"


async def all_is_well(app: ServedApp, before: dict[str, int]) -> None:
    """The replicas are those that there were, hold nothing, and answer what they could not."""
    assert await process_ids(app) == before
    await until(lambda: nothing_is_left(app), "all stages let go of the requests")


class FullStorePromises:
    """Of an application with each stage on a node of its own, and the ingresses on that of the last one."""

    @pytest.mark.parametrize("place", [-1, 0], ids=["where the ingresses are", "where they are read"])
    @pytest.mark.parametrize("shown", [LARGE, SMALL], ids=["a body that Ray stores", "a picture that Ray stores"])
    async def test_media_that_find_no_room_are_refused_and_others_are_answered(
        self, asking: Asking, place: int, shown: list[Any]
    ) -> None:
        await until(lambda: nothing_is_left(asking.app), "earlier requests are gone")
        before = await process_ids(asking.app)
        async with full_store(asking.app.stages[place]):
            refused, *others = await asyncio.gather(
                asking.asked(messages=shown), asking.asked_in_text(), asking.asked_in_text(messages=CARRIED)
            )
        assert is_refused(refused), refused.text
        assert [answer.status_code for answer in others] == [200, 200], [answer.text for answer in others]
        await all_is_well(asking.app, before)
        assert asking.is_whole(await asking.asked(messages=shown))

    @pytest.mark.parametrize("place", [0, 1], ids=["where they are made", "where they are read"])
    async def test_rows_that_find_no_room_end_their_request_and_nothing_else_dies(
        self, asking: Asking, place: int
    ) -> None:
        await until(lambda: nothing_is_left(asking.app), "earlier requests are gone")
        before = await process_ids(asking.app)
        beside = await asking.at_work(True)
        async with full_store(asking.app.stages[place]):
            whole, stream, *others = await asyncio.gather(
                asking.asked(messages=A_LONG_PROMPT),
                asking.asked(messages=A_LONG_PROMPT, stream=True),
                *[asking.asked(stream=each) for each in (False, True)],
            )
            silent = await asking.asked_in_text(messages=A_LONG_PROMPT)
            short = await asking.asked()
        assert is_refused(whole), whole.text
        assert is_refused(stream) or is_cut_short(stream), stream.text
        assert silent.status_code == 200, silent.text
        assert all(map(asking.is_whole, [short, *others])), [answer.text[-300:] for answer in [short, *others]]
        assert asking.is_whole(await beside[0])
        await all_is_well(asking.app, before)
        assert asking.is_whole(await asking.asked(messages=A_LONG_PROMPT))
