"""Questions go to a server as its clients ask them, and the figures are those of what it answered."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from omni_cluster.bench.errors import BenchError
from omni_cluster.bench.table import wide_console
from omni_cluster.types.inputs import OmniRequest
from tests.training.teller import HIGH_HZ, LOW_HZ, telling
from training import pictures, speech
from training.asking import Way, questions
from training.exam import Exam, answered, table, taken
from training.marking import understood
from training.saying import say
from training.speech import NoEspeak
from training.world import Kind, held_out

pytestmark = pytest.mark.usefixtures("tiny")
VOICES = ("Chelsie", "Ethan")


def nothing(sounds: list[np.ndarray], rate_hz: int) -> list[str]:
    return ["" for _ in sounds]


def test_questions_by_text_are_those_that_are_held_out_as_people_type_them() -> None:
    asked = questions(Way.TEXT, 20, VOICES, seed=3)
    assert [question.item for question in asked] == held_out(20, 3)
    assert [question.voice for question in asked[:3]] == ["Chelsie", "Ethan", "Chelsie"]
    for question in asked:
        *shown, text = question.content
        assert text == {"type": "text", "text": question.asked}
        assert len(shown) == (question.item.picture is not None)
    assert asked == questions(Way.TEXT, 20, VOICES, seed=3) != questions(Way.TEXT, 20, VOICES, seed=4)


def test_a_picture_is_shown_before_its_question() -> None:
    asked = questions(Way.PICTURE, 8, VOICES)
    assert len(asked) == 8 and {question.item.kind for question in asked} == {Kind.PICTURE}
    for question in asked:
        shown, text = question.content
        data = base64.b64decode(shown["image_url"]["url"].removeprefix("data:image/png;base64,"))
        assert question.item.picture is not None
        assert (np.asarray(Image.open(io.BytesIO(data))) == np.asarray(pictures.draw(question.item.picture))).all()
        assert text["text"] == question.asked


@pytest.mark.usefixtures("espeak")
def test_a_question_by_voice_is_sound_alone() -> None:
    (question,) = questions(Way.VOICE, 1, VOICES)
    (part,) = question.content
    assert base64.b64decode(part["input_audio"]["data"]) == question.wav and question.wav[:4] == b"RIFF"
    assert part["input_audio"]["format"] == "wav" and question.asked == question.item.question


async def test_right_answers_are_counted_as_right_and_voices_are_told_apart(tmp_path: Path) -> None:
    given = {question.asked: question.item for question in questions(Way.TEXT, 12, VOICES)}

    def tell(request: OmniRequest) -> str:
        (item,) = [item for asked, item in given.items() if f"{asked}<|im_end|>" in request.prompt.text]
        return item.answer if item.kind is not Kind.REPEAT else "the dog runs"

    async with telling(tmp_path, tell) as url:
        told = await asyncio.to_thread(taken, Exam(url, (Way.TEXT,), 12, VOICES, clients=3), nothing)
    of = told["ways"][Way.TEXT]
    repeated = sum(item.kind is Kind.REPEAT for item in given.values())
    assert 0 < repeated < 12 and of["lost"] == 0
    assert of["text"]["right"] == 12 - repeated and of["spoken"]["right"] == 0
    assert of["kinds"][Kind.REPEAT]["text"] == {"right": 0, "of": repeated, "share": 0.0}
    assert of["voices"]["Chelsie"]["pitch_hz"] == pytest.approx(HIGH_HZ, rel=0.03)
    assert of["voices"]["Ethan"]["pitch_hz"] == pytest.approx(LOW_HZ, rel=0.03)
    assert of["times"]["audio_s"] == {"p50": 3.0, "p95": 3.0} and of["times"]["first_audio_s"]["p50"] > 0
    assert len(of["wrong"]) == 12 and of["wrong"][0]["said"] == "the dog runs"
    console = wide_console()
    with console.capture() as printed:
        console.print(table(told))
    assert f"{100 * (12 - repeated) / 12:.1f} %" in printed.get() and "220 Hz" in printed.get()


@pytest.mark.usefixtures("espeak")
async def test_what_was_asked_by_voice_is_compared_with_its_transcript(tmp_path: Path) -> None:
    first, second = (question.item.question for question in questions(Way.VOICE, 2, VOICES))
    assert first != second

    async with telling(tmp_path, lambda request: first) as url:
        told = await asyncio.to_thread(taken, Exam(url, (Way.VOICE,), 2, VOICES), nothing)
    assert told["ways"][Way.VOICE]["transcripts"] == {"right": 1, "of": 2, "share": 0.5}
    assert {each["transcript"] for each in told["ways"][Way.VOICE]["wrong"]} == {first}


@pytest.mark.usefixtures("espeak")
async def test_what_espeak_says_of_right_answers_is_right_to_the_recogniser(tmp_path: Path) -> None:
    pytest.importorskip("pocketsphinx", reason="pocketsphinx is not installed; see training/README.md.")
    (first, second) = questions(Way.PICTURE, 2, VOICES)
    assert first.item.answer != second.item.answer

    async with telling(tmp_path, lambda request: first.item.answer, say) as url:
        exam = Exam(url, (Way.PICTURE,), 2, VOICES)
        told = (await asyncio.to_thread(taken, exam, partial(understood, processes=1)))["ways"][Way.PICTURE]
    assert told["spoken"] == told["text"] == {"right": 1, "of": 2, "share": 0.5}
    assert told["spoken_as_written"] == {"right": 2, "of": 2, "share": 1.0}
    assert told["wrong"][0]["understood"] == first.item.answer


async def test_answers_come_in_the_order_of_the_questions(tmp_path: Path) -> None:
    """However many clients ask: so the same questions' answers can be compared one by one."""
    async with telling(tmp_path, lambda request: "seven") as url:
        exam = Exam(url, (Way.TEXT,), 7, VOICES, clients=3)
        asked = exam.asked()
        _, answers = await answered(exam, asked)
    assert [answer.question for answer in answers[Way.TEXT]] == asked[Way.TEXT]


async def test_answers_that_are_not_streamed_are_marked_as_well(tmp_path: Path) -> None:
    first, second = (question.item.answer for question in questions(Way.TEXT, 2, VOICES))
    assert first != second

    async with telling(tmp_path, lambda request: first) as url:
        exam = Exam(url, (Way.TEXT,), 2, VOICES, streams=False)
        told = (await asyncio.to_thread(taken, exam, nothing))["ways"][Way.TEXT]
    assert told["text"] == {"right": 1, "of": 2, "share": 0.5} and told["lost"] == 0
    assert told["voices"]["Ethan"]["pitch_hz"] == pytest.approx(LOW_HZ, rel=0.03)
    assert told["times"]["audio_s"]["p50"] == 3.0


async def test_a_voice_that_is_not_there_is_told_with_the_server_s_sentence(tmp_path: Path) -> None:
    async with telling(tmp_path, lambda request: "seven") as url:
        with pytest.raises(BenchError, match=r"none of 2 questions was answered: .*the voices are Chelsie, Ethan"):
            await asyncio.to_thread(taken, Exam(url, (Way.TEXT,), 2, ("Nobody",)), nothing)


def test_without_espeak_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "PROGRAM", "espeak-that-is-not-there")
    with pytest.raises(NoEspeak, match="install the Debian package espeak-ng"):
        taken(Exam("http://127.0.0.1:9", (Way.VOICE,), 1), nothing)


def test_a_server_that_is_not_there_is_told_of() -> None:
    with pytest.raises(BenchError, match="name its address by --url"):
        taken(Exam("http://127.0.0.1:9", (Way.TEXT,), 1), nothing)


async def test_the_command_writes_its_figures(tmp_path: Path) -> None:
    pytest.importorskip("pocketsphinx", reason="pocketsphinx is not installed; see training/README.md.")
    out = tmp_path / "exam.json"
    async with telling(tmp_path, lambda request: "seven") as url:
        command = [sys.executable, "-m", "training.exam", "--url", url, "--by", "picture", "--questions", "2"]
        ran = await asyncio.to_thread(subprocess.run, [*command, "--out", str(out)], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "") and "text right" in ran.stdout
    written = json.loads(out.read_text())
    assert written["ways"]["picture"]["questions"] == 2 and written["command"].startswith("python -m training.exam")
