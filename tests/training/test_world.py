"""The small world's questions have one right answer each, in few plain words, and splits share none of them."""

from __future__ import annotations

import itertools
import re
from random import Random

import pytest

from training import words
from training.typed import typed
from training.world import WEIGHTS, Item, Kind, Split, held_out, items, vocabulary

MANY = 20_000
NUMBER = {word: number for number, word in enumerate(words.NUMBERS)}


@pytest.fixture(scope="module")
def trained() -> list[Item]:
    return list(itertools.islice(items(Split.TRAIN, 1), MANY))


@pytest.fixture(scope="module")
def kept_back() -> list[Item]:
    return list(itertools.islice(items(Split.HELD_OUT, 1), MANY))


def test_a_seed_is_a_set_of_items(trained: list[Item]) -> None:
    assert trained == list(itertools.islice(items(Split.TRAIN, 1), MANY))
    assert trained[:100] != list(itertools.islice(items(Split.TRAIN, 2), 100))


def test_every_kind_comes_as_often_as_its_weight(trained: list[Item]) -> None:
    assert sum(WEIGHTS.values()) == 100 and set(WEIGHTS) == set(Kind)
    for kind, weight in WEIGHTS.items():
        assert sum(item.kind is kind for item in trained) / MANY == pytest.approx(weight / 100, abs=0.015)


def test_no_key_is_of_both_splits(trained: list[Item], kept_back: list[Item]) -> None:
    for kind in Kind:
        known, unknown = ({item.key for item in split if item.kind is kind} for split in (trained, kept_back))
        assert known and unknown and not known & unknown


def test_at_least_300_questions_are_held_out_and_each_is_once() -> None:
    found = held_out(300)
    assert len({item.key for item in found}) == 300 and {item.kind for item in found} == set(Kind)
    assert all(item.split is Split.HELD_OUT for item in found)


def test_a_kind_with_few_held_out_questions_gives_those_it_has() -> None:
    assert 10 < len(held_out(100, kind=Kind.STAGES)) < 100


def test_what_is_held_out_is_known_in_parts(trained: list[Item], kept_back: list[Item]) -> None:
    """Answers are trained on by another phrasing; of sentences and counts the words are."""
    answers = {item.answer for item in trained}
    said = set(" ".join(answers).split())
    for item in kept_back:
        if item.kind in (Kind.REPEAT, Kind.COUNT):
            assert set(item.answer.split()) <= said
        else:
            assert item.answer in answers


def test_every_word_is_listed_and_plain(trained: list[Item], kept_back: list[Item]) -> None:
    used = {word for item in trained + kept_back for word in f"{item.question} {item.answer}".split()}
    assert used == set(vocabulary())
    assert all(re.fullmatch("[a-z]+", word) for word in used)


def test_answers_are_short(trained: list[Item], kept_back: list[Item]) -> None:
    assert max(len(item.answer.split()) for item in trained + kept_back) <= 12


@pytest.mark.parametrize("kind", [Kind.ADD, Kind.SUBTRACT])
def test_sums_are_right(kind: Kind) -> None:
    operands = set()
    for item in itertools.islice(items(Split.TRAIN, 3, kind), 5000):
        first, sign, second, _, result = item.answer.split()
        a, b = NUMBER[first], NUMBER[second]
        assert NUMBER[result] == (a + b if sign == "plus" else a - b)
        assert {first, second} <= set(item.question.split())
        operands.add((a, b))
    assert len(operands) == 231  # every pair with a result of 0 to 20


def test_what_is_taken_away_from_what() -> None:
    asked = {item.question: item.answer for item in itertools.islice(items(Split.TRAIN, 3, Kind.SUBTRACT), 5000)}
    turned = [question for question in asked if " from " in question]
    assert turned
    for question in turned:
        smaller, larger = (word for word in question.split() if word in NUMBER)
        assert asked[question].startswith(f"{larger} minus {smaller} is ")


def test_counts_have_every_number_between_their_ends() -> None:
    for item in itertools.islice(items(Split.TRAIN, 3, Kind.COUNT), 1000):
        said = [NUMBER[word] for word in item.answer.split()]
        assert {after - before for before, after in itertools.pairwise(said)} in ({1}, {-1})
        ends = [NUMBER[word] for word in item.question.split() if word in NUMBER]
        assert (
            said in ([*range(1, ends[0] + 1)], [*range(ends[0], 0, -1)])
            if len(ends) == 1
            else (ends == [said[0], said[-1]])
        )


def test_spelled_words_are_those_asked_for() -> None:
    for item in itertools.islice(items(Split.TRAIN, 3, Kind.SPELL), 500):
        assert item.question.split()[-1] == item.answer.replace(" ", "")


def test_the_calendar_is_right() -> None:
    its = (item for split in Split for item in itertools.islice(items(split, 3, Kind.CALENDAR), 5000))
    asked = {item.question: item.answer for item in its}
    assert asked["what day comes after sunday"] == "monday comes after sunday"
    assert asked["which month is before january"] == "december comes before january"
    assert asked["name the third month of the year"] == "the third month is march"
    assert asked["how long is february"] == "february has twenty eight days"


def test_a_question_about_a_picture_has_one_or_says_so() -> None:
    its = list(itertools.islice(items(Split.TRAIN, 3, Kind.PICTURE), 500))
    assert {item.answer for item in its if item.picture is None} == {"i see no picture"}
    for item in its:
        if item.picture:
            seen = {item.picture.colour, item.picture.shape}
            assert seen & set(item.answer.split())
            assert " a orange" not in item.answer and " an " not in item.answer.replace(" an orange", "")


@pytest.mark.parametrize("seed", range(3))
def test_what_is_typed_is_the_question_in_another_form(seed: int) -> None:
    forms = {typed("what is three plus four", Random(f"{seed} {number}")) for number in range(100)}
    assert {"what is three plus four", "What is 3 + 4?", "What is three plus four?"} <= forms
    assert typed("what is four minus one", Random(4)).lower().rstrip("?") in ("what is four minus one", "what is 4 - 1")
