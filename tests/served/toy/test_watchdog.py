"""The only replica of a stage is stopped or killed: its requests go on, it is replaced, and no process stays."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.http_app import nothing_is_left
from tests.processes import family, running_after
from tests.served.app import ServedApp, until
from tests.served.recovering import Recovering, sound_begins
from tests.served.replaced import NOTICED_S, all_are_replaced, process_ids

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("stage", ["text", "codes", "sound"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_requests_survive_the_only_replica_of_a_stage_and_it_is_replaced(
    toy: ServedApp, recovering: Recovering, stage: str, end: signal.Signals
) -> None:
    expected, before = await recovering.undisturbed(recovering.body()), await process_ids(toy)
    processes = family(before[stage])

    async def ends(app: ServedApp, stage: str) -> None:
        os.kill(before[stage], end)

    recovering.assert_same(await recovering.answer_with(recovering.body(), (sound_begins, ends, stage)), expected)
    assert not await asyncio.to_thread(running_after, processes, NOTICED_S), f"a process of {stage} stayed"
    after = await all_are_replaced(toy, {stage: before[stage]})
    assert {name for name in after if after[name] != before[name]} == {stage}
    await until(lambda: nothing_is_left(toy), "all stages let go of the request")
