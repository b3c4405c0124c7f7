"""Marks answers: what is right in text, what a recogniser understands, in time and at which pitch."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from omni_cluster.bench.stats import FIGURES
from training.asking import Answer
from training.pitch import pitch_hz
from training.recogniser import Recogniser
from training.speech import Sound

MOST_WRONG: Final = 20
"""Of each way of asking, so many wrong answers are told."""
TIMES: Final = ("first_text_s", "first_audio_s", "first_audible_s", "rtf", "audio_s", "stall_s")

Understand = Callable[[Sequence[Sound], int], list[str]]
"""The words of sounds at a rate."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What came of a question. `said`: the text; `understood`: the recogniser's words of the sound.

    `lost`: why there is no whole answer, None where there is one. `times`: those of `TIMES` that it has.
    """

    way: str
    kind: str
    voice: str
    question: str
    wanted: str
    said: str
    understood: str
    transcript: str | None
    lost: str | None
    pitch_hz: float | None
    times: Mapping[str, float]

    @property
    def is_right(self) -> bool:
        return self.lost is None and self.said == self.wanted

    @property
    def is_understood(self) -> bool:
        """The right answer is."""
        return self.lost is None and self.understood == self.wanted

    @property
    def is_as_written(self) -> bool:
        """The sound says what the text does, be that right or wrong."""
        return self.lost is None and self.understood == self.said

    @property
    def as_wrong(self) -> dict[str, Any]:
        """For the list of what went wrong: all but what is measured."""
        return {name: value for name, value in asdict(self).items() if name not in ("way", "pitch_hz", "times")}


def understood(sounds: Sequence[Sound], rate_hz: int, processes: int) -> list[str]:
    """By so many processes, each with a recogniser. Raises NoRecogniser."""
    Recogniser()  # what is missing is told here, not by a process that ends
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        return list(pool.map(functools.partial(_text, rate_hz), sounds, chunksize=4))


_recogniser = functools.cache(Recogniser)


def _text(rate_hz: int, sound: Sound) -> str:
    return _recogniser().text(sound, rate_hz) if len(sound) else ""


def marked(answers: Sequence[Answer], understand: Understand) -> list[Mark]:
    if not answers:
        return []
    rate_hz = answers[0].record.sample_rate_hz
    texts = understand([answer.sound for answer in answers], rate_hz)
    return [_mark(answer, text) for answer, text in zip(answers, texts, strict=True)]


def _mark(answer: Answer, text: str) -> Mark:
    question, record = answer.question, answer.record
    times = {name: FIGURES[name](record) for name in TIMES}
    return Mark(
        way=question.way,
        kind=question.item.kind,
        voice=question.voice,
        question=question.asked,
        wanted=question.item.answer,
        said=plain(record.reply),
        understood=text,
        transcript=None if answer.transcript is None else plain(answer.transcript),
        lost=_lost(answer),
        pitch_hz=pitch_hz(answer.sound, record.sample_rate_hz) if len(answer.sound) else None,
        times={name: value for name, value in times.items() if value is not None},
    )


def plain(text: str) -> str:
    """Without spaces at its ends, and with one between words."""
    return " ".join(text.split())


def _lost(answer: Answer) -> str | None:
    if answer.record.error is not None:
        return answer.record.error
    if not answer.record.reply or not len(answer.sound):
        return "the answer has no sound." if answer.record.reply else "the answer has no text."
    return None


# ------------------------------------------------------------------ the figures of all


def report(marks: Sequence[Mark]) -> dict[str, Any]:
    """The figures of one way of asking, as JSON has them."""
    return {
        "questions": len(marks),
        "lost": sum(mark.lost is not None for mark in marks),
        "text": share(mark.is_right for mark in marks),
        "spoken": share(mark.is_understood for mark in marks),
        "spoken_as_written": share(mark.is_as_written for mark in marks),
        "transcripts": share(m.transcript == m.question for m in marks if m.transcript is not None),
        "kinds": {kind: _of_kind(of) for kind, of in _by(marks, lambda mark: mark.kind).items()},
        "voices": {voice: _of_voice(of) for voice, of in _by(marks, lambda mark: mark.voice).items()},
        "times": _times(marks),
        "wrong": wrong(marks),
    }


def _of_kind(marks: Sequence[Mark]) -> dict[str, Any]:
    right, heard = (mark.is_right for mark in marks), (mark.is_understood for mark in marks)
    return {"text": share(right), "spoken": share(heard)}


def _of_voice(marks: Sequence[Mark]) -> dict[str, Any]:
    pitches = [mark.pitch_hz for mark in marks if mark.pitch_hz is not None]
    return {
        "spoken": share(mark.is_understood for mark in marks),
        "spoken_as_written": share(mark.is_as_written for mark in marks),
        "pitch_hz": round(float(np.median(pitches)), 1) if pitches else None,
    }


def share(flags: Iterable[bool]) -> dict[str, Any]:
    given = list(flags)
    right = sum(given)
    return {"right": right, "of": len(given), "share": round(right / len(given), 4) if given else None}


def _by(marks: Sequence[Mark], name: Callable[[Mark], str]) -> dict[str, list[Mark]]:
    found: dict[str, list[Mark]] = {}
    for mark in sorted(marks, key=name):
        found.setdefault(name(mark), []).append(mark)
    return found


def _times(marks: Sequence[Mark]) -> dict[str, dict[str, float]]:
    values = {name: [mark.times[name] for mark in marks if mark.lost is None and name in mark.times] for name in TIMES}
    return {name: quantiles(of) for name, of in values.items() if of}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    return {"p50": round(float(np.median(values)), 4), "p95": round(float(np.percentile(values, 95)), 4)}


def wrong(marks: Sequence[Mark], most: int = MOST_WRONG) -> list[dict[str, Any]]:
    """What is lost first, then what the text has wrong, then what the sound alone has wrong."""
    found = [mark for mark in marks if not (mark.is_right and mark.is_understood)]
    found.sort(key=lambda mark: (mark.lost is None, mark.is_right))
    return [mark.as_wrong for mark in found[:most]]
