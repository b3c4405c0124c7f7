"""The examples that need no packages but ours, as their users run them: curl for every endpoint, a talk in Python."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from tests.browser import written
from tests.example_folders import EXAMPLES, RATE_HZ, SPEECH, kept_answer, ran, started
from tests.http_app import MODEL
from tests.relay import relay
from tests.served.app import BASE_URL, ServedApp

CURL = EXAMPLES / "curl"
TALK = EXAMPLES / "realtime_python" / "talk.py"
CURLRC = 'write-out = "%{stderr}%{method} %{url}\\n"\n'
"""Each call of curl says what it asked."""


@dataclass(frozen=True)
class Ran:
    """What a script printed, which endpoints it asked, and where it kept files."""

    printed: str
    asked: tuple[tuple[str, str], ...]
    folder: Path

    def answer(self, line: int = 0) -> Any:
        return json.loads(self.printed.splitlines()[line])

    @property
    def text(self) -> str:
        return str(self.answer()["choices"][0]["message"]["content"])


class Scripts:
    """Runs each script once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ran: dict[str, Ran] = {}

    async def ran(self, name: str, **variables: str) -> Ran:
        if name not in self._ran:
            folder = self._folder / name
            folder.mkdir()
            (folder / ".curlrc").write_text(CURLRC)
            async with started(CURL / name, folder=folder, CURL_HOME=str(folder)) as program:
                status, printed, err = await program.ended()
            assert status == 0, (printed, err)
            asked = re.findall(rf"^([A-Z]+) {BASE_URL}(/\S*)$", err, re.MULTILINE)
            self._ran[name] = Ran(printed, tuple(asked), folder)
        return self._ran[name]


@pytest.fixture(scope="module")
def scripts(served: ServedApp, tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    return Scripts(tmp_path_factory.mktemp("curl"))


def _decoded(path: Path) -> int:
    """How many samples."""
    with av.open(str(path)) as file:
        return sum(frame.samples for frame in file.decode(audio=0))


def _is_a_chat(it: Ran) -> None:
    assert it.text and it.answer()["usage"]["prompt_tokens_details"]["audio_tokens"] == 0


def _is_streamed(it: Ran) -> None:
    *events, last = [line.removeprefix("data: ") for line in it.printed.split("\n\n") if line]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert last == "[DONE]" and "".join(choice["delta"].get("content", "") for choice in choices)


def _saw_a_picture(it: Ran) -> None:
    """A picture of 112 x 112 has 16 tokens, and the words around it 34."""
    assert it.text and it.answer()["usage"]["prompt_tokens"] == 16 + 34


def _heard_a_sound(it: Ran) -> None:
    assert it.text and it.answer()["usage"]["prompt_tokens_details"]["audio_tokens"] > 0


def _is_spoken(it: Ran) -> None:
    audio = it.answer()["choices"][0]["message"]["audio"]
    assert audio["transcript"] == it.text != "" and audio["data"] == "..."
    kept_answer(it.folder)


def _is_completed(it: Ran) -> None:
    assert it.answer()["choices"][0]["text"] and it.answer()["usage"]["completion_tokens"] == 32


def _is_a_response(it: Ran) -> None:
    assert it.answer()["output"][0]["content"][0]["text"]


def _is_a_wave(it: Ran) -> None:
    (it.folder / "speech.wav").rename(it.folder / "answer.wav")
    kept_answer(it.folder)


def _is_an_mp3(it: Ran) -> None:
    assert _decoded(it.folder / "speech.mp3") > RATE_HZ


def _is_written_down(it: Ran) -> None:
    assert it.answer()["text"] and it.answer()["usage"]["input_token_details"]["audio_tokens"] > 0


def _is_in_tokens(it: Ran) -> None:
    assert it.answer()["count"] == len(it.answer()["tokens"]) > 1


def _is_of_tokens(it: Ran) -> None:
    assert len(it.answer()["prompt"]) == 3


def _is_well(it: Ran) -> None:
    healthy, ready, *metrics = it.printed.splitlines()
    assert json.loads(healthy) == {"status": "healthy"} and json.loads(ready)["ready"]
    assert any(line.startswith("omni_cluster_stage_requests_total") for line in metrics)


def _names_the_model(it: Ran) -> None:
    assert it.answer()["data"] == [it.answer(1)] and it.answer(1)["id"] == MODEL


def _names_voices(it: Ran) -> None:
    assert it.answer()["names"] == ["Chelsie", "Ethan"]


CHECKS: Mapping[str, Callable[[Ran], None]] = {
    "chat.sh": _is_a_chat,
    "chat_picture.sh": _saw_a_picture,
    "chat_sound.sh": _heard_a_sound,
    "chat_spoken.sh": _is_spoken,
    "chat_stream.sh": _is_streamed,
    "completions.sh": _is_completed,
    "detokenize.sh": _is_of_tokens,
    "health.sh": _is_well,
    "models.sh": _names_the_model,
    "responses.sh": _is_a_response,
    "speech.sh": _is_a_wave,
    "speech_stream.sh": _is_an_mp3,
    "tokenize.sh": _is_in_tokens,
    "transcriptions.sh": _is_written_down,
    "translations.sh": _is_written_down,
    "voices.sh": _names_voices,
}


@pytest.mark.parametrize("name", sorted(path.name for path in CURL.glob("*.sh")))
async def test_a_script_of_curl_gets_its_answer(scripts: Scripts, name: str) -> None:
    CHECKS[name](await scripts.ran(name))


async def test_a_stream_has_the_text_of_the_whole_answer(scripts: Scripts) -> None:
    streamed = (await scripts.ran("chat_stream.sh")).printed
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"].get("content", "") for event in events for choice in event["choices"]]
    assert "".join(deltas) == (await scripts.ran("chat.sh")).text


async def test_every_endpoint_has_a_script(served: ServedApp, scripts: Scripts) -> None:
    """Those of the schema. Pages and WebSockets are none of curl's."""
    paths = (await asyncio.to_thread(served.client.get, "/openapi.json")).json()["paths"]
    endpoints = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    asked = {each for name in CHECKS for each in (await scripts.ran(name)).asked}
    assert len(endpoints) > 10
    assert {each for each in endpoints if not any(is_of(each, one) for one in asked)} == set()
    assert {one for one in asked if not any(is_of(each, one) for each in endpoints)} == set()


def is_of(endpoint: tuple[str, str], asked: tuple[str, str]) -> bool:
    path = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(endpoint[1]))
    return endpoint[0] == asked[0] and re.fullmatch(path, asked[1]) is not None


@pytest.mark.parametrize("name", ["chat.sh", "chat_spoken.sh", "transcriptions.sh"])
async def test_a_script_of_curl_tells_why_it_was_refused(served: ServedApp, tmp_path: Path, name: str) -> None:
    async with started(CURL / name, folder=tmp_path, MODEL="nobody") as program:
        status, out, err = await program.ended()
    assert status != 0 and "model_not_found" in out + err


@pytest.mark.full
async def test_a_talk_from_files_plays_each_answer_to_its_end(served: ServedApp, tmp_path: Path) -> None:
    async with relay(BASE_URL) as it:
        printed = await ran(sys.executable, TALK, SPEECH, SPEECH, folder=tmp_path, BASE_URL=it.url)
    assert printed == "".join(f"{it.text(each)}\n" for each in it.responses)
    assert [each["status"] for each in it.responses] == ["incomplete"] * 2, "the toy speaks until its limit"
    np.testing.assert_array_equal(kept_answer(tmp_path), np.concatenate([it.sound(each) for each in it.responses]))
    assert it.of("error") == [] == it.of("conversation.item.truncated")


SOUNDDEVICE = """
import os, signal, threading, wave


class RawStream:
    \"""A microphone that has the speech and then silence; presses Ctrl-C once the speakers had a second of sound.\"""

    def __init__(self, samplerate, blocksize, *, channels, dtype, callback):
        assert (channels, dtype) == (1, "int16")
        self.rate_hz, self.size, self.callback = samplerate, blocksize, callback
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        sounding = 0
        with wave.open("SPEECH") as file:
            while not self.ends.wait(self.size / self.rate_hz):
                played = bytearray(2 * self.size)
                spoken = file.readframes(self.size).ljust(2 * self.size, bytes(1))
                self.callback(memoryview(spoken), memoryview(played), self.size, None, None)
                sounding += any(played)
                if sounding * self.size == self.rate_hz:
                    os.kill(os.getpid(), signal.SIGINT)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.ends.set()
        self.thread.join()
"""
"""In the place of the package, whose library needs a device: the same call, from a thread in real time."""


@pytest.mark.full
async def test_a_talk_by_microphone_lasts_until_ctrl_c(served: ServedApp, tmp_path: Path) -> None:
    (tmp_path / "sounddevice.py").write_text(SOUNDDEVICE.replace("SPEECH", str(SPEECH)))
    async with relay(BASE_URL) as it:
        printed = await ran(sys.executable, TALK, folder=tmp_path, BASE_URL=it.url, PYTHONPATH=str(tmp_path))
    assert printed.strip() and it.text().startswith(printed.removesuffix("\n"))
    played = kept_answer(tmp_path)
    np.testing.assert_array_equal(played, it.sound()[: len(played)])
    assert len(played) >= RATE_HZ


@pytest.mark.parametrize(("rate_hz", "fault"), [(None, "No such file or directory"), (16_000, "has another format")])
async def test_a_talk_refuses_a_file_in_a_sentence(
    served: ServedApp, tmp_path: Path, rate_hz: int | None, fault: str
) -> None:
    if rate_hz is not None:
        written(tmp_path / "question.wav", np.ones(rate_hz, np.int16), rate_hz)
    async with started(sys.executable, TALK, "question.wav", folder=tmp_path) as program:
        status, _, err = await program.ended()
    assert status == 1 and fault in err and "question.wav" in err and "Traceback" not in err
