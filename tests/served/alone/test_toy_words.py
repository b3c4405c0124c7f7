"""A replica of the trained toy dies amid an answer, and what is said is what is written."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.chaos.soak import nothing_is_left
from tests.served.app import ROOT, STAGES, ServedApp, serve_run, until
from tests.served.recovering import Recovering, sound_begins, text_begins
from tests.served.replaced import all_are_replaced, process_ids
from training.pairs import likeness_db
from training.recogniser import Recogniser
from training.saying import ANSWER_HZ

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

QUESTION = "What is the capital of France?"
ANSWER = "i am only a toy and do not know that"
"""Of training's own, and among the longest: seconds are left of it when its sound begins."""
LEAST_DB = 28.0
"""Of a streamed answer, beside the whole one: a trained vocoder sees further than the ends of pieces.

A kill moves these ends. Without one this answer has 29.2 to 60.5 dB by where pieces end, 27.5 at most with one wrong
code, and 16 with 0.06 s of silence (benchmarks/results/2026-11-28-cpu-toy-variants.txt).
"""


@pytest.fixture(scope="module")
def toy() -> Iterator[ServedApp]:
    with serve_run(f"config={ROOT / 'stage_configs' / 'qwen2_5_omni_toy.yaml'}") as app:
        yield app


@pytest.fixture(scope="module")
def recovering(toy: ServedApp) -> Recovering:
    """No sound of its own lengths is asked for: an answer ends where the model ends it."""
    return Recovering(toy, lengths={}, short={}, voice="Ethan", tolerance=0)


@pytest.mark.parametrize("stage", STAGES)
async def test_the_words_are_those_of_the_text_though_a_replica_is_killed(
    toy: ServedApp, recovering: Recovering, stage: str
) -> None:
    """The only one of its stage, at its first text or sound. The thinker may have said all of its text by then."""
    asked = recovering.body(QUESTION)
    pids, before = await process_ids(toy), await recovering.recoveries()
    expected = await recovering.undisturbed(asked)
    recogniser = Recogniser()

    async def kill(_: ServedApp, stage: str) -> None:
        os.kill(pids[stage], signal.SIGKILL)

    moment = text_begins if stage == "thinker" else sound_begins
    heard = await recovering.answer_with(asked, (moment, kill, stage))
    assert (heard.errors, heard.text, len(heard.samples)) == ([], expected.text, len(expected.samples))
    assert likeness_db(expected.samples, heard.samples) > LEAST_DB
    assert recogniser.text(heard.samples, ANSWER_HZ) == heard.text == ANSWER
    await all_are_replaced(toy, {stage: pids[stage]})
    after = await recovering.recoveries()
    lost = {name: after[name] - before[name] for name in STAGES if after[name] > before[name]}
    assert lost == {stage: 1} or (stage == "thinker" and not lost)
    await until(lambda: nothing_is_left(toy), "all stages let go of the request")
