"""An independent recogniser understands espeak-ng's own answers, in both voices: what a model can reach at most."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from training import speech
from training.recogniser import NoRecogniser, Recogniser, answers_automaton
from training.saying import ANSWER_HZ, SPEAKERS, say
from training.world import Kind, held_out

UNDERSTOOD = 0.95
has_espeak = shutil.which(speech.PROGRAM) is not None
has_pocketsphinx = importlib.util.find_spec("pocketsphinx") is not None
needs_both = pytest.mark.skipif(
    not (has_espeak and has_pocketsphinx), reason="espeak-ng or pocketsphinx is not installed; see training/README.md."
)


class Automaton:
    """Follows words through the transitions of pocketsphinx's format."""

    def __init__(self, text: str) -> None:
        self.start, self.final = (int(re.search(rf"{name} (\d+)", text)[1]) for name in ("START_STATE", "FINAL_STATE"))  # type: ignore[index]
        self.ways: dict[tuple[int, str], set[int]] = {}
        for state, follows, word in re.findall(r"^TRANSITION (\d+) (\d+) 1\.0 ?(\w*)$", text, re.MULTILINE):
            self.ways.setdefault((int(state), word), set()).add(int(follows))

    def takes(self, words: str) -> bool:
        states = {self.start}
        for word in words.split():
            states = {follows for state in states for follows in self.ways.get((state, word), set())}
        return any(self.final in self.ways.get((state, ""), set()) for state in states)


@pytest.fixture(scope="module")
def automaton() -> Automaton:
    return Automaton(answers_automaton())


@pytest.mark.parametrize("kind", Kind)
def test_every_answer_is_in_the_grammar(kind: Kind, automaton: Automaton) -> None:
    assert all(automaton.takes(item.answer) for item in held_out(200, 1, kind))


@pytest.mark.parametrize("wrong", ["three plus four is eight", "one three two", "it is a circle", "the toy sings"])
def test_wrong_answers_are_in_the_grammar_and_other_sentences_are_not(wrong: str, automaton: Automaton) -> None:
    assert automaton.takes(wrong) is (wrong != "the toy sings")
    assert not automaton.takes(f"{wrong} is") and not automaton.takes("")


def test_without_the_package_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pocketsphinx", None)
    with pytest.raises(NoRecogniser, match=r"^pocketsphinx is not installed; install the project's extra: training\.$"):
        Recogniser()


@pytest.fixture(scope="module")
def listener() -> Recogniser:
    return Recogniser()


@needs_both
def test_noise_is_no_answer(listener: Recogniser) -> None:
    noise = np.random.default_rng(1).standard_normal(2 * ANSWER_HZ).astype(np.float32) * 0.1
    assert listener.text(noise, ANSWER_HZ) not in {item.answer for item in held_out(300)}
    assert listener.text(np.zeros(ANSWER_HZ, np.float32), ANSWER_HZ) == ""


@needs_both
@pytest.mark.parametrize("speaker", SPEAKERS)
def test_a_wrong_sum_is_written_down_as_it_is_said(listener: Recogniser, speaker: str) -> None:
    for said in ("three plus four is seven", "three plus four is six", "it is red", "i see a blue star"):
        assert listener.text(say(said, speaker), ANSWER_HZ) == said


@needs_both
@pytest.mark.parametrize("speaker", SPEAKERS)
def test_the_words_before_a_sound_is_stopped_are_found(listener: Recogniser, speaker: str) -> None:
    text = "the green bird sings near the river"
    sound = say(text, speaker)
    counts = [len(listener.begun(text, sound[: int(share * len(sound))], ANSWER_HZ)) for share in (0.3, 0.6, 0.8, 1)]
    assert counts == sorted(counts) and 2 <= counts[0] <= 3 and 4 <= counts[1] <= 5 and counts[3] == 7
    assert listener.begun(text, sound[:0], ANSWER_HZ) == [] == listener.begun("qwerty", sound, ANSWER_HZ)
    assert listener.text(sound, ANSWER_HZ) == text


@pytest.mark.full
@needs_both
def test_nearly_all_answers_are_understood_in_both_voices() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "training.recogniser"], capture_output=True, text=True, check=True
    ).stdout
    for speaker in SPEAKERS:
        understood, all_of_them = map(int, re.search(rf"{speaker}: (\d+) of (\d+)", printed).groups())  # type: ignore[union-attr]
        assert understood / all_of_them >= UNDERSTOOD
