"""What the talker is to say: texts, their codes, and which word each code says."""

from __future__ import annotations

import json
from itertools import chain
from random import Random

import numpy as np
import pytest

from training.codes import Codebook, codes_of_texts
from training.durations import Durations
from training.texts import drawn_texts, plain, written
from training.world import Split, vocabulary


@pytest.mark.parametrize("cores", [0, 2])
def test_codes_are_the_codebooks_and_kept(codebook, tmp_path, cores):
    kept = tmp_path / "codes.json"
    codes = codes_of_texts(["blue", "a b c"], codebook, kept, cores)
    assert codes == {text: Codebook.load(codebook).codes_of(text) for text in ("a b c", "blue")}
    file = json.loads(kept.read_text())
    file["codes"]["blue"] = [5]
    kept.write_text(json.dumps(file))
    assert codes_of_texts(["blue", "red"], codebook, kept, cores)["blue"] == [5]
    assert json.loads(kept.read_text())["codes"].keys() == {"blue", "a b c", "red"}


def test_codes_of_another_codebook_are_made_anew(codebook, tmp_path):
    kept = tmp_path / "codes.json"
    kept.write_text(json.dumps({"codebook": "another", "codes": {"blue": [5]}}))
    assert len(codes_of_texts(["blue"], codebook, kept, 0)["blue"]) > 20


def test_words_are_as_long_as_texts_tell():
    lengths, rng = {word: 8 + 4 * place for place, word in enumerate("abcdefgh")}, Random(0)
    texts = [" ".join(rng.choices("abcdefgh", k=rng.randint(1, 6))) for _ in range(300)]
    codes = {text: [1] * (13 + 5 + sum(lengths[word] for word in text.split())) for text in texts}
    measured = Durations.measured(codes)
    assert measured.more == pytest.approx(5, abs=0.3)
    assert {word: round(length) for word, length in measured.words.items()} == lengths
    said = measured.words_of("b a a", 13 + 5 + 12 + 8 + 8).tolist()
    assert said == [-1] * 3 + [0] * 12 + [1] * 8 + [2] * 13 + [-1] * 10


def test_a_word_that_was_not_measured_has_its_place():
    said = Durations({"a": 10.0, "b": 20.0}, 0.0).words_of("a new b", 13 + 45)
    assert np.bincount(said + 1).tolist() == [13, 10, 15, 20]


def test_all_kinds_of_texts_are_read_and_held_out_words_are_others():
    trained, held_out = drawn_texts(50, Split.TRAIN, 0), drawn_texts(50, Split.HELD_OUT, 0)
    assert trained.keys() == held_out.keys() == {"answer", "question", "words", "letters"}
    assert {*trained["letters"]} & {*held_out["letters"]}  # a single letter, say
    unknown = drawn_texts(50, Split.HELD_OUT, 0, but={*chain(*trained.values())})
    for kind, texts in unknown.items():
        assert {*texts} == {*held_out[kind]} - {*chain(*trained.values())} != set()
    assert {word for text in trained["words"] for word in text.split()} <= set(vocabulary())
    assert all(len(letter) == 1 for text in trained["letters"] for letter in text.split())
    assert drawn_texts(50, Split.TRAIN, 0) == trained


def test_what_is_written_says_the_plain_text():
    rng = Random(0)
    forms = {written("you are big", rng) for _ in range(100)}
    assert {"you are big", "You are big.", "You are big?"} < forms
    assert {plain(form) for form in forms} == {"you are big"}
