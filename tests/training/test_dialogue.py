"""Conversations over a server that tells one sentence: what it hears, and what it remembers of a cut answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from omni_cluster.bench.errors import BenchError
from omni_cluster.server.realtime.speech_time import SpeechTime
from omni_cluster.server.realtime.spoken_text import heard_text, letters_per_s
from omni_cluster.types.inputs import OmniRequest
from tests.server.realtime.spoken import sentences
from tests.training.teller import CODES, telling
from training.caller import Caller, Played
from training.dialogue import LISTENS_S, LONG, Taken, Turn, report, table, talk, turns
from training.saying import ANSWER_HZ, SAMPLES_A_CODE, SPEAKERS
from training.speech import Sound

pytestmark = pytest.mark.usefixtures("tiny")
TOLD = "the green bird sings near the river"
LISTENED_S = 0.6


@dataclass(frozen=True)
class Ended:
    """An answer, as the server knows it."""

    text: str
    speech_s: float
    is_whole: bool = True


class Counter:
    """In the place of the recogniser: says of each sound that it ends at a word."""

    def __init__(self, words: int) -> None:
        self._words = words

    def begun(self, text: str, sound: Sound, rate_hz: int) -> list[str]:
        return text.split()[: self._words]


def spoken_turns() -> list[Turn]:
    """The first answer is talked over."""
    sounds = [np.pad(samples.astype(np.float32) / 2**15, (2400, 2400)) for samples in sentences()]
    return [Turn("one", TOLD, sounds[0], listens_s=LISTENED_S), Turn("two", TOLD, sounds[1])]


async def test_an_answer_that_is_talked_over_is_remembered_to_the_word_that_was_played(tmp_path: Path) -> None:
    def tell(request: OmniRequest) -> str:
        return TOLD if request.wants_audio else "one"

    async with telling(tmp_path, tell) as url:
        taken = await talk(url, spoken_turns(), next(iter(SPEAKERS)))
    cut, whole = (each.answer for each in taken)
    assert [each.transcript for each in taken] == ["one", "one"]
    assert cut.text == whole.text == TOLD
    assert cut.stopped_s is not None and LISTENED_S < cut.stopped_s < CODES * SAMPLES_A_CODE / ANSWER_HZ
    speech = SpeechTime()
    speech.add(whole.heard(), ANSWER_HZ)
    heard_s = speech.until(int(1000 * cut.stopped_s) / 1000)
    ended = Ended(TOLD, speech.until())  # the server may have made the answer to its end, or not quite
    paces = [letters_per_s(replace(ended, is_whole=is_whole), []) for is_whole in (True, False)]
    assert taken[0].remembered in {len(heard_text(TOLD, heard_s * pace).split()) for pace in paces}
    assert whole.stopped_s is None and whole.status == "completed" and taken[1].remembered is None
    assert len(cut.heard()) == int(cut.stopped_s * ANSWER_HZ) < len(whole.heard()) == CODES * SAMPLES_A_CODE


async def test_a_server_that_is_not_there_is_told_of() -> None:
    with pytest.raises(BenchError, match=r"http://127\.0\.0\.1:9 ended the session"):
        await talk("http://127.0.0.1:9", spoken_turns(), next(iter(SPEAKERS)))


def taken_turn(question: str, transcript: str, said: str, stopped_s: float | None = None, remembered: int = 0) -> Taken:
    answer = Played(text=said, status="completed", pcm=bytearray(4 * ANSWER_HZ), stopped_s=stopped_s)
    turn = Turn(question, TOLD, np.zeros(1, np.float32), listens_s=stopped_s)
    return Taken(turn, transcript, answer, None if stopped_s is None else remembered)


def test_a_cut_at_the_word_before_or_behind_the_one_that_was_played_counts() -> None:
    taken = [
        taken_turn("what is red", "what is red", TOLD),
        taken_turn("what is blue", "what is glue", "no"),
        *(taken_turn("say it", "say it", TOLD, 1.0, remembered) for remembered in (2, 3, 4, 5)),
    ]
    told = report(taken, Counter(3))
    assert told["turns"] == 6 and told["transcripts"] == {"right": 5, "of": 6, "share": 0.8333}
    assert told["text"] == {"right": 1, "of": 2, "share": 0.5}  # of a cut answer the text may be cut too
    assert told["interruptions"] == {"right": 3, "of": 4, "share": 0.75} and told["words_apart"] == [-1, 0, 1, 2]
    assert [each["played"] for each in told["conversation"]] == [None, None, 3, 3, 3, 3]
    assert table(told).row_count == 6


@pytest.mark.usefixtures("espeak")
def test_the_answers_that_are_talked_over_are_long_and_spread_evenly() -> None:
    said = turns(10, 3, seed=1)
    cut = {number: turn.listens_s for number, turn in enumerate(said) if turn.listens_s is not None}
    assert list(cut) == [1, 4, 7]
    assert all(len(said[number].wanted.split()) >= LONG for number in cut)
    assert len({*cut.values()}) == 3 and LISTENS_S[0] <= min(cut.values()) < max(cut.values()) <= LISTENS_S[1]
    assert all(0.5 < len(turn.sound) / ANSWER_HZ < 8 for turn in said)
    assert len({turn.question for turn in said}) == 10
    assert all(turn.listens_s is None for turn in turns(3, 0))


@pytest.mark.usefixtures("espeak")
@pytest.mark.parametrize(("number", "interruptions"), [(2, 1), (4, 2), (5, 2), (10, 5), (11, 5), (20, 10)])
def test_no_answer_is_to_be_talked_over_that_no_turn_follows(number: int, interruptions: int) -> None:
    cut = [turn.listens_s is not None for turn in turns(number, interruptions)]
    assert sum(cut) == interruptions and not cut[-1]


async def test_a_client_listens_on_where_the_sound_is_still_made() -> None:
    caller, answer = Caller(cast(Any, None)), Played()
    loop = asyncio.get_running_loop()
    answer.add(bytes(2 * ANSWER_HZ // 100), begun_s := loop.time())
    await caller.listen(answer, 0.05)
    assert loop.time() - begun_s >= 0.05
    answer.status = "completed"
    await caller.listen(answer, 500.0)  # nothing is left to play
