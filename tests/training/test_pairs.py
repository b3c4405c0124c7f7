"""Answers to the same questions are compared one by one, in text, in words that are understood, and in sound."""

from __future__ import annotations

import numpy as np
import pytest

from omni_cluster.bench.record import RequestRecord
from tests.training.sayings import chord
from training.asking import Answer, Question, Way
from training.marking import marked
from training.pairs import MOST_DB, Taken, Turned, likeness_db, paired
from training.saying import ANSWER_HZ
from training.speech import Sound
from training.world import Item, Kind

DOG = Item(Kind.SPELL, "spell dog", "d o g")


def taken(said: list[str], understood: list[str], sounds: list[Sound]) -> Taken:
    answers = [
        Answer(
            Question(DOG, Way.TEXT, "Ethan", DOG.question),
            RequestRecord(number=0, total_s=1.0, reply=reply, sample_rate_hz=ANSWER_HZ),
            sound,
        )
        for reply, sound in zip(said, sounds, strict=True)
    ]
    return answers, marked(answers, lambda sounds, rate_hz: understood)


def test_what_is_right_in_one_alone_is_counted_in_each_direction() -> None:
    sounds = [chord(20)] * 4
    base = taken(["d o g", "d o g", "d o", "d o g"], ["d o g", "d o g", "d o", "d"], sounds)
    other = taken(["d o g", "c a t", "d o g", "d o g"], ["d o g", "c a t", "d", "d o g"], sounds)
    pairs = paired(base, other)
    assert (pairs.text, pairs.spoken) == (Turned(lost=1, gained=1), Turned(lost=1, gained=1))
    assert (pairs.same_text, pairs.same_words, pairs.same_length) == (2, 1, 4)
    assert pairs.as_json()["text"] == {"lost": 1, "gained": 1} and pairs.as_json()["spoken_chance"] == 1.0


@pytest.mark.parametrize(
    ("lost", "gained", "chance"), [(0, 0, 1.0), (1, 1, 1.0), (5, 0, 2 / 32), (0, 6, 2 / 64), (9, 2, 2 * 67 / 2048)]
)
def test_the_chance_is_that_of_a_fair_coin(lost: int, gained: int, chance: float) -> None:
    assert Turned(lost, gained).chance == pytest.approx(chance)


def test_sounds_of_one_length_are_compared_by_what_differs() -> None:
    sound = chord(20)
    assert likeness_db(sound, sound) == MOST_DB
    assert likeness_db(sound, 0.9 * sound) == pytest.approx(20, abs=0.01)
    assert likeness_db(np.zeros_like(sound), sound) < -60
    base = taken(["d o g"] * 3, [""] * 3, [sound, sound, sound])
    other = taken(["d o g"] * 3, [""] * 3, [0.9 * sound, 0.99 * sound, chord(19)])
    pairs = paired(base, other)
    assert pairs.same_length == 2 and pairs.like_db == pytest.approx(30, abs=0.1)


def test_without_sounds_of_one_length_none_are_alike() -> None:
    pairs = paired(taken(["d o g"], [""], [chord(20)]), taken(["d o g"], [""], [chord(19)]))
    assert (pairs.same_length, pairs.like_db) == (0, None)
