"""Given answers are counted as they are: by kind and voice, in text and in sound, and what is lost is right nowhere."""

from __future__ import annotations

import numpy as np
import pytest

from omni_cluster.bench.record import AudioArrival, RequestRecord
from tests.training.sayings import chord
from training.asking import Answer, Question, Way
from training.marking import MOST_WRONG, marked, report
from training.saying import ANSWER_HZ
from training.world import Item, Kind

SEVEN = Item(Kind.ADD, "what is three plus four", "three plus four is seven")
DOG = Item(Kind.SPELL, "spell dog", "d o g")


def answer(
    item: Item, reply: str, voice: str = "Chelsie", *, hz: float = 200, error: str | None = None,
    transcript: str | None = None,
) -> Answer:  # fmt: skip
    sound = np.zeros(0, np.float32) if error else chord(100, hz)
    record = RequestRecord(
        number=0, total_s=1.0, audio=(AudioArrival(0.25, len(sound)),), reply=reply, error=error,
        sample_rate_hz=ANSWER_HZ,
    )  # fmt: skip
    return Answer(Question(item, Way.TEXT, voice, item.question), record, sound, transcript)


def given() -> list[Answer]:
    return [
        answer(SEVEN, " three plus four  is seven\n"),
        answer(SEVEN, "three plus four is six", "Ethan", hz=110, transcript="what is three plus five"),
        answer(DOG, "d o g", "Ethan", hz=110, transcript="spell dog"),
        answer(DOG, "d o g", error="the server is closing."),
    ]


UNDERSTOOD = ["three plus four is seven", "three plus four is six", "d o", ""]


def test_what_is_right_in_text_and_in_sound_is_counted_apart() -> None:
    told = report(marked(given(), lambda sounds, rate_hz: UNDERSTOOD))
    assert (told["questions"], told["lost"]) == (4, 1)
    assert told["text"] == {"right": 2, "of": 4, "share": 0.5}
    assert told["spoken"] == {"right": 1, "of": 4, "share": 0.25}
    assert told["spoken_as_written"]["right"] == 2
    assert told["transcripts"] == {"right": 1, "of": 2, "share": 0.5}
    assert told["kinds"]["add"]["text"] == {"right": 1, "of": 2, "share": 0.5}
    assert told["kinds"]["spell"]["spoken"] == {"right": 0, "of": 2, "share": 0.0}


def test_each_voice_has_its_share_and_its_pitch() -> None:
    voices = report(marked(given(), lambda sounds, rate_hz: UNDERSTOOD))["voices"]
    assert voices["Chelsie"]["spoken"] == {"right": 1, "of": 2, "share": 0.5}
    assert voices["Ethan"]["spoken_as_written"] == {"right": 1, "of": 2, "share": 0.5}
    assert voices["Chelsie"]["pitch_hz"] == pytest.approx(200, rel=0.02)
    assert voices["Ethan"]["pitch_hz"] == pytest.approx(110, rel=0.02)


def test_times_are_those_of_answers_that_came() -> None:
    times = report(marked(given(), lambda sounds, rate_hz: UNDERSTOOD))["times"]
    assert times["first_audio_s"] == {"p50": 0.25, "p95": 0.25} and times["rtf"] == {"p50": 0.5, "p95": 0.5}


def test_what_went_wrong_is_told_the_lost_first_and_no_more_than_a_few() -> None:
    wrong = report(marked(given(), lambda sounds, rate_hz: UNDERSTOOD))["wrong"]
    assert [(each["said"], each["understood"], each["lost"]) for each in wrong] == [
        ("d o g", "", "the server is closing."),
        ("three plus four is six", "three plus four is six", None),
        ("d o g", "d o", None),
    ]
    assert wrong[1]["question"] == SEVEN.question and wrong[1]["wanted"] == SEVEN.answer
    many = report(marked([answer(DOG, "c a t")] * (MOST_WRONG + 5), lambda sounds, rate_hz: [""] * len(sounds)))
    assert len(many["wrong"]) == MOST_WRONG and many["text"] == {"right": 0, "of": MOST_WRONG + 5, "share": 0.0}


def test_nothing_is_no_share() -> None:
    assert report(marked([], lambda sounds, rate_hz: []))["text"] == {"right": 0, "of": 0, "share": None}
