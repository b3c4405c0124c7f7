"""Writes down spoken answers, by pocketsphinx and its own model: no part of it has seen what is trained here.

Its grammar has what can be answered, by kind: sums that are wrong, numbers in any order, sentences that were not asked
for. So a wrong answer is written down as it is said. Of letters it knows the words to spell: their names are too alike.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import numpy as np

from training import phrases, words
from training.saying import ANSWER_HZ, LOUDNESS, SPEAKERS, say
from training.speech import QUESTION_HZ, Sound, resampled, scaled, with_noise
from training.world import held_out

NOISE_DB: Final = 25.0
"""So much below what is said: the model has learned from microphones, and mistakes the clean gaps of made sound."""
OPTIONS: Final = {"cmn": "batch", "wip": 0.05, "lw": 1.0}
"""All answers are as likely, so the language's weight only makes silence and noise between words too unlikely."""
PRONUNCIATIONS: Final = {"dog": ("D AA G",), "orange": ("AO R IH N JH",), "robot": ("R OW B AA T",)}
"""As espeak-ng speaks, where the dictionary knows only other ways."""
_VOWELS: Final = "aeiou"


class NoRecogniser(Exception):
    """The package that recognises speech is not in this environment."""


class Recogniser:
    """Of answers, for one thread."""

    def __init__(self, **options: Any) -> None:
        try:
            from pocketsphinx import Decoder, get_model_path
        except ImportError:
            raise NoRecogniser("pocketsphinx is not installed; install the project's extra: training.") from None
        with tempfile.TemporaryDirectory() as folder:
            dictionary, automaton = Path(folder, "words.dict"), Path(folder, "answers.fsg")
            listed = Path(get_model_path("en-us/cmudict-en-us.dict")).read_text().splitlines()
            automaton.write_text(answers_automaton())
            dictionary.write_text("\n".join(pronounced(listed, set(automaton.read_text().split()))) + "\n")
            self._decoder = Decoder(
                hmm=get_model_path("en-us/en-us"), dict=str(dictionary), fsg=str(automaton), loglevel="FATAL",
                **OPTIONS | options,
            )  # fmt: skip

    def text(self, sound: Sound, rate_hz: int) -> str:
        """Plain words; none where nothing that can be answered fits."""
        self._decoder.activate_search()
        return self._words(sound, rate_hz)

    def begun(self, text: str, sound: Sound, rate_hz: int) -> list[str]:
        """The words of `text` that a sound says before it ends; none from a word on that is in no answer."""
        words = list(takewhile(self._decoder.lookup_word, text.split()))
        if not (words and len(sound)):
            return []
        ends = [(place, len(words), 1.0) for place in range(len(words))]
        steps = [(place, place + 1, 1.0, word) for place, word in enumerate(words)]
        automaton = self._decoder.create_fsg("begun", start_state=0, final_state=len(words), transitions=steps + ends)
        self._decoder.add_fsg("begun", automaton)
        self._decoder.activate_search("begun")
        return self._words(sound, rate_hz).split()

    def _words(self, sound: Sound, rate_hz: int) -> str:
        loud = scaled(resampled(sound, rate_hz, QUESTION_HZ), LOUDNESS)
        samples = with_noise(loud, LOUDNESS * 10 ** (-NOISE_DB / 20), seed=0)
        self._decoder.start_utt()
        self._decoder.process_raw((samples * (2**15 - 1)).astype(np.int16).tobytes(), full_utt=True)
        self._decoder.end_utt()
        found = self._decoder.hyp()
        return found.hypstr if found else ""


def pronounced(listed: list[str], needed: set[str]) -> Iterator[str]:
    """The dictionary's lines of those words."""
    for line in listed:
        if re.sub(r"\(\d+\)$", "", line.split()[0]) in needed:
            yield line
    for word, ways in PRONUNCIATIONS.items():
        yield from (f"{word}({number}) {way}" for number, way in enumerate(ways, 11))


# ------------------------------------------------------------------ the grammar


def answer_templates() -> list[str]:
    """All that can be answered; `{noun}` is one of the words of that name in `classes`."""
    number = "{number}"
    return [
        *phrases.SAYINGS, *phrases.SENTENCES, *map(" ".join, words.SPELLED),
        *(" ".join([number] * length) for length in range(1, 11)),
        phrases.SUM.format(*[number] * 3), phrases.DIFFERENCE.format(*[number] * 3),
        phrases.SEEN[0].format("{colour_a}", "{shape}"), phrases.SEEN[1].format("{colour_an}", "{shape}"),
        phrases.COLOUR.format("{colour}"), phrases.SHAPE.format("{shape}"), phrases.NO_PICTURE,
        phrases.COMES_AFTER.format("{date}", "{date}"), phrases.COMES_BEFORE.format("{date}", "{date}"),
        phrases.NTH.format("{nth}", "{unit}", "{date}"),
        *(phrases.LENGTH.format("{date}", length) for length in words.LARGE_NUMBERS.values()),
        *phrases.CALENDAR, *phrases.IDENTITY, *phrases.STAGES, phrases.OUTSIDE_ANSWER,
    ]  # fmt: skip


def classes() -> dict[str, Iterable[str]]:
    return {
        **phrases.FILLERS,
        "shape": words.SHAPES,
        "colour_a": [colour for colour in words.COLOURS if colour[0] not in _VOWELS],
        "colour_an": [colour for colour in words.COLOURS if colour[0] in _VOWELS],
        "date": words.DAYS + words.MONTHS,
        "nth": words.ORDINALS,
        "unit": ("day", "month"),
    }


Tails = tuple[tuple[str, Any], ...]
"""Of a state: each template's next part, with the state that it leads to. The empty part ends an answer."""


def answers_automaton() -> str:
    """In pocketsphinx's format. Templates share how they begin and how they end, so that it stays small and fast."""
    numbers: dict[Tails, int] = {}
    start = _state([template.split() for template in answer_templates()], numbers)
    final, named = len(numbers), classes()
    lines = []
    for tails, state in numbers.items():
        for part, follows in tails:
            ways = named[part[1:-1]] if part.startswith("{") else [part]
            lines += [f"TRANSITION {state} {follows if part else final} 1.0 {way}".rstrip() for way in ways]
    head = ["FSG_BEGIN answers", f"NUM_STATES {final + 1}", f"START_STATE {start}", f"FINAL_STATE {final}"]
    return "\n".join([*head, *lines, "FSG_END", ""])


def _state(templates: list[list[str]], numbers: dict[Tails, int]) -> int:
    """The number of the state that goes on with one of the templates: equal ones are one."""
    rest: dict[str, list[list[str]]] = {}
    for template in templates:
        rest.setdefault(template[0] if template else "", []).append(template[1:])
    tails = tuple((part, _state(rest[part], numbers) if part else 0) for part in sorted(rest))
    return numbers.setdefault(tails, len(numbers))


# ------------------------------------------------------------------ the command


def main() -> None:
    """Prints how much of espeak-ng's own speech is understood, and what is not."""
    recogniser, its = Recogniser(), held_out(300)
    for speaker in SPEAKERS:
        found = [recogniser.text(say(item.answer, speaker), ANSWER_HZ) for item in its]
        wrong = [(item.answer, text) for item, text in zip(its, found, strict=True) if item.answer != text]
        print(f"{speaker}: {len(its) - len(wrong)} of {len(its)} answers are understood.")
        print(*(f"  {answer}: {text or 'nothing'}" for answer, text in wrong), sep="\n")


if __name__ == "__main__":
    main()
