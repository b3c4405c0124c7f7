"""Asks a server of the toy what it was not trained on, and tells how much of it is answered right.

    python -m training.exam --url http://127.0.0.1:8000 --questions 300 --by all --out exam.json

It needs espeak-ng for spoken questions, and the project's extra `training`, whose recogniser hears the answers.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
from rich.table import Table

from omni_cluster.api_client import CONNECT_TIMEOUT_S, BadAnswer
from omni_cluster.bench.errors import BenchError
from omni_cluster.bench.http_client import first_model
from omni_cluster.bench.load import closed_loop
from omni_cluster.bench.machine import this_machine
from omni_cluster.bench.table import wide_console
from omni_cluster.cli_values import count, whole
from training.asking import Answer, Asker, Question, Way, questions
from training.marking import Understand, marked, report, understood
from training.recogniser import NoRecogniser, Recogniser
from training.saying import SPEAKERS
from training.speech import NoEspeak

TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Exam:
    """`clients` ask at once; each way gets so many `questions`, whose answers are to be in the `voices` by turns.

    `streams`: whether answers come as they are made.
    """

    url: str
    ways: tuple[Way, ...] = (Way.VOICE,)
    questions: int = 300
    voices: tuple[str, ...] = tuple(SPEAKERS)
    seed: int = 0
    clients: int = 1
    streams: bool = True

    def asked(self) -> dict[Way, list[Question]]:
        """Raises NoEspeak."""
        return {way: questions(way, self.questions, self.voices, self.seed) for way in self.ways}


def taken(exam: Exam, understand: Understand) -> dict[str, Any]:
    """All figures. Raises NoEspeak, and BenchError where no question was answered."""
    model, answers = asyncio.run(answered(exam, exam.asked()))
    ways = {way: report(marked(of, understand)) for way, of in answers.items()}
    return {"url": exam.url, "model": model, "seed": exam.seed, "clients": exam.clients, "ways": ways}


async def answered(exam: Exam, asked: Mapping[Way, Sequence[Question]]) -> tuple[str, dict[Way, list[Answer]]]:
    """The model's name, and the answers of each way, in the questions' order.

    All are asked before one is marked: marking takes the cores. Raises BenchError where no question was answered.
    """
    timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    # A proxy that the environment names would be measured with the server.
    async with httpx.AsyncClient(base_url=exam.url, timeout=timeout, trust_env=False) as http:
        model = await first_model(http, exam.url)
        asker = Asker(http, model, exam.streams)
        answers = {way: await closed_loop(asker.ask, of, exam.clients) for way, of in asked.items()}
        check_answered([answer for of in answers.values() for answer in of])
        if Way.VOICE in answers:
            answers[Way.VOICE] = await closed_loop(partial(_with_transcript, asker), answers[Way.VOICE], exam.clients)
        return model.name, {way: in_order(of, asked[way]) for way, of in answers.items()}


def in_order(answers: Sequence[Answer], of: Sequence[Question]) -> list[Answer]:
    """Clients that ask at once have each its own."""
    places = {id(question): place for place, question in enumerate(of)}
    return sorted(answers, key=lambda answer: places[id(answer.question)])


async def _with_transcript(asker: Asker, answer: Answer) -> Answer:
    """A question that the server does not write down has an empty transcript."""
    try:
        return replace(answer, transcript=await asker.transcribe(answer.question.wav))
    except (BadAnswer, httpx.HTTPError):
        return replace(answer, transcript="")


def check_answered(answers: Sequence[Answer]) -> None:
    """Raises BenchError where none is an answer."""
    errors = [answer.record.error for answer in answers if answer.record.error is not None]
    if errors and len(errors) == len(answers):
        raise BenchError(f"none of {len(answers)} questions was answered: {errors[0]}")


# ------------------------------------------------------------------ the table


def table(result: Mapping[str, Any]) -> Table:
    """A line a way, and below it one for each kind and each voice."""
    made = Table("asked by", "", title=f"{result['model']}, {result['clients']} at once; seconds: p50 / p95")
    for name in ("questions", "lost", "text right", "spoken right", "pitch", "first sound", "RTF", "transcripts"):
        made.add_column(name, justify="right", no_wrap=True)
    for way, of in result["ways"].items():
        made.add_row(*_line(way, of))
        for kind, its in of["kinds"].items():
            made.add_row("", kind, str(its["text"]["of"]), "", percent(its["text"]), percent(its["spoken"]))
        for voice, its in of["voices"].items():
            pitch = "-" if its["pitch_hz"] is None else f"{its['pitch_hz']:.0f} Hz"
            made.add_row("", voice, str(its["spoken"]["of"]), "", "", percent(its["spoken"]), pitch)
        made.add_section()
    return made


def _line(way: str, of: Mapping[str, Any]) -> Iterator[str]:
    yield from (way, "all", str(of["questions"]), str(of["lost"]), percent(of["text"]), percent(of["spoken"]), "")
    for name in ("first_audio_s", "rtf"):
        times = of["times"].get(name)
        yield f"{times['p50']:.2f} / {times['p95']:.2f}" if times else "-"
    yield percent(of["transcripts"])


def percent(its: Mapping[str, Any]) -> str:
    return "-" if its["share"] is None else f"{100 * its['share']:.1f} %"


# ------------------------------------------------------------------ the command


def written(result: Mapping[str, Any], module: str, out: Path | None) -> None:
    """With what tells how it came to be."""
    head = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "machine": asdict(this_machine("the client; what serves may be another machine")),
    }
    if out is not None:
        out.write_text(json.dumps({**head, **result}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Asks a server of the toy what it was not trained on.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--questions", type=count, default=300, help="of each way of asking")
    parser.add_argument("--by", choices=[*Way, "all"], default="voice")
    parser.add_argument("--voices", default=",".join(SPEAKERS), help="of the answers, by turns")
    parser.add_argument("--seed", type=whole, default=0)
    parser.add_argument("--clients", type=count, default=1, help="so many questions are asked at once")
    parser.add_argument("--processes", type=count, default=os.cpu_count(), help="that understand the answers")
    parser.add_argument("--out", type=Path, help="a JSON file with all figures and what went wrong")
    given = parser.parse_args()
    ways = tuple(Way) if given.by == "all" else (Way(given.by),)
    exam = Exam(given.url, ways, given.questions, tuple(given.voices.split(",")), given.seed, given.clients)
    try:
        Recogniser()  # what is missing is told before a question is asked
        result = taken(exam, partial(understood, processes=given.processes))
    except (BenchError, NoEspeak, NoRecogniser) as error:
        sys.exit(str(error))
    written(result, "training.exam", given.out)
    wide_console().print(table(result))


if __name__ == "__main__":
    main()
