"""The field's clients, unmodified and with their own defaults: only address, key, model and the length are given.

Each runs as a script of its own, in an environment of its own. `make test` runs the one whose packages are here,
`make test-all` a few, `make clients` all.
"""

from __future__ import annotations

import wave
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import av
import pytest

from tests.clients.field import CLIENTS
from tests.clients.plain import MAX_TOKENS, Plain
from tests.clients.runs import SCRIPT_S, Client, Runs
from tests.http_app import MODEL
from tests.packages import FETCH_S

SAMPLE_RATE_HZ = 24_000
SAMPLES_A_CODE = 480

EACH = [
    pytest.param(client, did, id=f"{client.name}:{did}", marks=[getattr(pytest.mark, mark) for mark in client.marks])
    for client in CLIENTS
    for did in client.does
]

Seen = Mapping[str, Any]


@pytest.mark.timeout(FETCH_S + SCRIPT_S)
@pytest.mark.parametrize(("client", "did"), EACH)
def test_a_client_gets_what_a_plain_one_gets(plain: Plain, runs: Runs, client: Client, did: str) -> None:
    saw = runs.saw(client, did)
    assert saw.ok, saw.seen["error"]
    # What is asked by another of the client's models has the answers of the first.
    CHECKS[did.removeprefix("openai chat ")](plain, saw.seen, runs.folder_of(client))


def _until_its_stop(text: str, seen: Seen) -> str:
    """A client that raises at an answer which ends at its length gives a stop."""
    stop = seen.get("stop")
    return text if stop is None else text.split(stop)[0]


def _is_the_text(plain: Plain, seen: Seen, folder: Path) -> None:
    assert seen["text"] == _until_its_stop(plain.text, seen)
    assert seen.get("finish", "length") == "length" and seen.get("tokens", MAX_TOKENS) == MAX_TOKENS


def _is_the_stream_s_text(plain: Plain, seen: Seen, folder: Path) -> None:
    _is_the_text(plain, seen, folder)
    assert seen.get("whole", seen["text"]) == seen["text"]


def _is(what: Callable[[Plain], str]) -> Callable[[Plain, Seen, Path], None]:
    def check(plain: Plain, seen: Seen, folder: Path) -> None:
        assert seen["text"] == what(plain) and seen["text"] != plain.text

    return check


def _is_of_the_picture(plain: Plain, seen: Seen, folder: Path) -> None:
    """Some clients put a picture behind the text, some before it."""
    texts = [_until_its_stop(text, seen) for text in (plain.text_of_picture, plain.text_of_picture_first)]
    assert seen["text"] in texts and seen["text"] != plain.text


def _is_heard(plain: Plain, seen: Seen, folder: Path) -> None:
    """A file that plays, in whole codes where its format keeps every sample."""
    path = folder / seen["file"]
    samples = _samples(path)
    assert samples > 0
    if path.suffix in (".wav", ".pcm") and "was" not in seen:
        assert samples % SAMPLES_A_CODE == 0
    assert seen.get("text", plain.text) == plain.text
    assert seen.get("all tokens", MAX_TOKENS) == MAX_TOKENS + seen.get("audio tokens", 0)


def _samples(path: Path) -> int:
    if path.suffix == ".pcm":
        return path.stat().st_size // 2
    if path.suffix == ".wav":
        with wave.open(str(path)) as file:
            assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (SAMPLE_RATE_HZ, 1, 2)
            return len(file.readframes(file.getnframes())) // 2
    with av.open(str(path)) as container:
        frames = list(container.decode(audio=0))
    assert {(frame.sample_rate, frame.layout.nb_channels) for frame in frames} == {(SAMPLE_RATE_HZ, 1)}
    return sum(frame.samples for frame in frames)


def _is_heard_piece_by_piece(plain: Plain, seen: Seen, folder: Path) -> None:
    samples = _samples(folder / seen["file"])
    assert samples > 0 and samples % SAMPLES_A_CODE == 0
    assert seen["text"] == plain.text
    assert len(seen["ids"]) == 1, "OpenAI sends the sound's id once"


def _is_a_call(plain: Plain, seen: Seen, folder: Path) -> None:
    """Of the tool that was asked for, with arguments of its schema; and there is an answer to its result."""
    assert seen["name"] == "set_lamp"
    _is_a_lamp(seen["arguments"])
    assert seen.get("text") != "" and seen.get("text") != plain.text


def _is_a_switch(plain: Plain, seen: Seen, folder: Path) -> None:
    """By a client that writes no schema of strings which are few."""
    assert seen["name"] == "set_lamp" and seen["arguments"] in ({"on": True}, {"on": False})
    assert seen["text"] and seen["text"] != plain.text


def _is_heard_as_words(plain: Plain, seen: Seen, folder: Path) -> None:
    """Of a client that puts silence behind the sound: the model hears another one."""
    assert seen["text"]


def _is_an_object(plain: Plain, seen: Seen, folder: Path) -> None:
    _is_a_lamp(seen["object"])


def _begins_an_object(plain: Plain, seen: Seen, folder: Path) -> None:
    assert seen["text"].lstrip().startswith("{")


def _is_a_lamp(value: Any) -> None:
    assert value.keys() == {"color", "on"} and value["color"] in ("red", "green") and isinstance(value["on"], bool)


def _is_the_model(plain: Plain, seen: Seen, folder: Path) -> None:
    assert seen["ids"] == [MODEL]


def _are_the_voices(plain: Plain, seen: Seen, folder: Path) -> None:
    assert seen["voices"][:2] == ["Chelsie", "Ethan"]


def _is_whole_load(plain: Plain, seen: Seen, folder: Path) -> None:
    assert seen["completed"] == seen["requests"] and seen["failed"] == 0
    assert seen["tokens"] == seen.get("tokens asked", seen["tokens"]) > 0


def _is_too_long(plain: Plain, seen: Seen, folder: Path) -> None:
    assert "maximum context length is" in seen["message"]


def _names_the_field(plain: Plain, seen: Seen, folder: Path) -> None:
    assert seen["param"] == "temperature" and "temperature is 9" in seen["message"]


CHECKS: Mapping[str, Callable[[Plain, Seen, Path], None]] = {
    "models": _is_the_model,
    "chat": _is_the_text,
    "chat after embeddings": _is_the_text,
    "messages": _is_the_text,
    "stream": _is_the_stream_s_text,
    "openai chat": _is_the_text,
    "second turn": _is(lambda plain: plain.second_text),
    "image": _is_of_the_picture,
    "sound in": _is(lambda plain: plain.text_of_sound),
    "developer": _is(lambda plain: plain.instructed_text),
    "sound out": _is_heard,
    "spoken second turn": _is(lambda plain: plain.second_text),
    "streamed sound": _is_heard_piece_by_piece,
    "program of the page": _is_heard,
    "tool": _is_a_call,
    "switch": _is_a_switch,
    "structured": _is_an_object,
    "structured by a schema": _is_an_object,
    "structured by a tool": _is_an_object,
    "parse": _is_an_object,
    "json object": _begins_an_object,
    "completions": _is(lambda plain: plain.completion),
    "transcription": _is(lambda plain: plain.transcript),
    "English transcription": _is(lambda plain: plain.english_transcript),
    "padded transcription": _is_heard_as_words,
    "translation": _is(lambda plain: plain.translation),
    "speech": _is_heard,
    "voice": _is_heard,
    "voices": _are_the_voices,
    "responses": _is_the_text,
    "responses stream": _is_the_stream_s_text,
    "responses second turn": _is(lambda plain: plain.second_text),
    "responses image": _is_of_the_picture,
    "responses structured": _is_an_object,
    "responses tool": _is_a_call,
    "load": _is_whole_load,
    "load of completions": _is_whole_load,
    "load of responses": _is_whole_load,
    "refused": _names_the_field,
    "too long": _is_too_long,
}
