"""`omni-cluster chat` against the toy's API, as a user has it: on a terminal, and with its input from a program."""

from __future__ import annotations

import io
import re
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from PIL import Image

from omni_cluster.terminal import sound
from omni_cluster.terminal.attachments import file_part
from omni_cluster.terminal.server import TerminalError
from tests.chatting import PATIENCE_S, command, environment, run, toy_app
from tests.pages import ROOT
from tests.server.local import LocalApp
from tests.terminal import CTRL_C, Terminal, on_terminal

SAID = "Good morning"
PLAYER = """#!/bin/sh
echo "$@" > "{folder}/arguments"
exec /bin/cat > "{folder}/played"
"""
DEAF = """#!/bin/sh
echo > "{folder}/plays"
exec /bin/sleep 1000
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalApp]:
    with toy_app(tmp_path_factory.mktemp("toy")) as app:
        yield app


def pcm_of(toy: LocalApp, text: str, voice: str = "low") -> bytes:
    """The sound of a chat's answer: the toy's differs by its voice, and by all that it was told."""
    body = {"model": "preset:tiny", "input": text, "voice": voice, "response_format": "pcm"}
    answer = toy.client.post("/v1/audio/speech", json=body)
    assert answer.status_code == 200, answer.text
    return answer.content


def player(folder: Path, script: str) -> Path:
    program = folder / "aplay"
    program.write_text(script.format(folder=folder))
    program.chmod(0o755)
    return folder


def test_lines_of_a_program_are_asked_one_by_one_and_the_sound_is_saved(toy: LocalApp, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("chat", "--url", toy.url, "--save", str(out), typed=f"{SAID}\n\nAnd now?\n")
    second = f"{SAID}\n{SAID}\nAnd now?"
    """The toy says all that it is told: the second message comes with the first and its answer."""
    assert (done.returncode, done.stdout) == (0, f"{SAID}\n{second}\n"), done.stderr
    for number, text in enumerate((SAID, second), 1):
        with wave.open(str(out / f"answer_{number}.wav")) as file:
            assert file.readframes(file.getnframes()) and file.getnframes() * 2 == len(pcm_of(toy, text))
    assert re.findall(r"answer_\d\.wav: \d+\.\d\d s", done.stderr) == done.stderr.replace(f"{out}/", "").splitlines()
    again = run("chat", "--url", toy.url, "--save", str(out), "--voice", "high", typed=SAID)
    assert again.returncode == 0 and (out / "answer_3.wav").read_bytes() != (out / "answer_1.wav").read_bytes()


def test_files_go_with_the_next_message(toy: LocalApp, tmp_path: Path) -> None:
    Image.new("RGB", (7, 3)).save(tmp_path / "small.png")
    (tmp_path / "note.txt").write_text("A note.")
    picture, note = (f"/file {tmp_path / name}\n" for name in ("small.png", "note.txt"))
    done = run("chat", "--url", toy.url, "--text", typed=f"{picture}Look\n{note}Read\n{picture}")
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert first == "[7x3] Look" and "note.txt:" in others and "A note." in done.stdout
    assert done.stderr.count("it goes with the next message") == 3


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("/file\n", "/file needs a path, for example /file question.wav."),
        ("/file none.png\n", "the file none.png cannot be read (No such file or directory); name one that can."),
        ("/frobnicate\n", "/frobnicate is no command; there are /file, /mic, /voice, /help, /quit."),
        ("/mic\n", "/mic needs the package sounddevice"),
        ("/voice Bob\nHi\n", 'the server says: audio.voice is "Bob", but the voices are high, low.'),
    ],
)
def test_what_cannot_be_done_is_one_sentence(toy: LocalApp, tmp_path: Path, typed: str, words: str) -> None:
    done = run("chat", "--url", toy.url, "--save", str(tmp_path), typed=f"{typed}Never asked\n")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"omni-cluster: {words}")


def test_a_server_that_is_none_is_one_sentence(toy: LocalApp, tmp_path: Path) -> None:
    for url, words in (
        ("http://127.0.0.1:1", "http://127.0.0.1:1 does not answer"),
        ("nowhere", "the URL 'nowhere' is none"),
        (f"{toy.url}/v2", "is no path of this API"),
    ):
        done = run("chat", "--url", url, typed="Hi\n")
        assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    done = run("chat", "--url", toy.url, "--key-file", str(tmp_path / "none"), typed="Hi\n")
    assert done.returncode == 2 and "cannot be read" in done.stderr


def test_commands_of_the_chat(toy: LocalApp) -> None:
    done = run("chat", "--url", toy.url, typed="/help\n/voice\n/quit\nNever asked\n")
    assert (done.returncode, done.stdout) == (0, "")
    assert "/file PATH" in done.stderr and "low, high\n" in done.stderr


def test_sound_is_played_by_a_program_where_one_is_there(toy: LocalApp, tmp_path: Path) -> None:
    env = environment(player(tmp_path, PLAYER))
    done = run("chat", "--url", toy.url, typed=SAID, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{SAID}\n", "")
    assert len((tmp_path / "played").read_bytes()) == len(pcm_of(toy, SAID))
    rate_hz = toy.client.get("/v1/models").json()["data"][0]["sound"]["sample_rate_hz"]
    assert (tmp_path / "arguments").read_text().split() == sound.PLAYERS["aplay"].format(rate_hz=rate_hz).split()


def test_without_a_player_answers_are_text_and_the_user_is_told(toy: LocalApp, tmp_path: Path) -> None:
    done = run("chat", "--url", toy.url, typed=SAID, env=environment(tmp_path))
    assert (done.returncode, done.stdout) == (0, f"{SAID}\n")
    assert done.stderr.startswith("Answers come without sound: there is no player here.")
    done = run("chat", "--url", toy.url, "--text", typed=SAID, env=environment(tmp_path))
    assert (done.stdout, done.stderr) == (f"{SAID}\n", "")


def until_asked(terminal: Terminal) -> None:
    terminal.until(lambda: terminal.lines[-1] == ">", PATIENCE_S)


def until_shown(terminal: Terminal, words: str) -> None:
    terminal.until(lambda: any(words in line for line in terminal.lines), PATIENCE_S)


def test_ctrl_c_stops_an_answer_and_a_second_one_ends(tmp_path: Path) -> None:
    """An answer that would take a minute, of which the beginning is shown as it comes."""
    with (
        toy_app(tmp_path, token_s=0.5) as slow,
        on_terminal(command("chat", "--url", slow.url, "--text"), tmp_path, environment()) as terminal,
    ):
        until_asked(terminal)
        terminal.press(b"word " * 30 + b"\r")
        terminal.until(lambda: terminal.lines[-1].startswith("wor"), PATIENCE_S)
        terminal.press(CTRL_C)
        until_shown(terminal, "Stopped.")
        until_asked(terminal)
        terminal.press(CTRL_C)
        assert terminal.end(PATIENCE_S) == 130
        assert not any("Traceback" in line for line in terminal.lines)


def test_ctrl_c_stops_what_is_played(toy: LocalApp, tmp_path: Path) -> None:
    env = environment(player(tmp_path, DEAF))
    with on_terminal(command("chat", "--url", toy.url), tmp_path, env) as terminal:
        until_asked(terminal)
        terminal.press(f"{SAID}\r".encode())
        terminal.until(lambda: SAID in terminal.lines and (tmp_path / "plays").exists(), PATIENCE_S)
        terminal.press(CTRL_C)
        until_shown(terminal, "Stopped.")
        terminal.press(b"/voice nobody\r" + b"Hi\r")  # what is wrong is said, and the chat goes on
        until_shown(terminal, "but the voices are high, low.")
        terminal.press(b"/quit\r")
        assert terminal.end(PATIENCE_S) == 0


class Recorder:
    """A microphone that hears a second of a tone at once."""

    def __init__(self, samplerate: int, callback: object, **_: object) -> None:
        self._rate_hz, self._callback = samplerate, callback

    def __enter__(self) -> None:
        self._callback(b"\x01\x02" * self._rate_hz, self._rate_hz, None, None)  # type: ignore[operator]

    def __exit__(self, *_: object) -> None:
        pass


def test_what_a_microphone_hears_is_a_sound_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(RawInputStream=Recorder, PortAudioError=OSError)
    monkeypatch.setitem(sys.modules, "sounddevice", library)  # type: ignore[arg-type]
    with wave.open(io.BytesIO(sound.recorded(lambda: None))) as file:
        assert (file.getframerate(), file.getnframes()) == (16_000, 16_000)
        assert file.readframes(1) == b"\x01\x02"


def test_a_sound_card_plays_in_order_and_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    stream = SimpleNamespace(
        start=lambda: done.append("start"),
        write=done.append,
        stop=lambda: done.append("stop"),
        close=lambda: done.append("close"),
        abort=lambda: done.append("abort"),
    )
    library = ModuleType("sounddevice")
    library.RawOutputStream = lambda **_: stream  # type: ignore[attr-defined]
    library.PortAudioError = OSError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sounddevice", library)
    with sound.Playing(sound.found_player(), 24_000) as playing:
        playing.add(b"ab")
        playing.add(b"cd")
    assert done == ["start", b"ab", b"cd", "stop", "close"]
    done.clear()
    with pytest.raises(KeyboardInterrupt), sound.Playing(sound.found_player(), 24_000) as playing:
        playing.add(b"ab")
        raise KeyboardInterrupt
    assert done[-1] == "abort" and "stop" not in done


def test_a_file_that_is_nothing_of_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TerminalError, match="is no text; its name should end in one of wav, mp3"):
        file_part(path)
    parts = {"wav": "audio_url", "JPG": "image_url", "mkv": "video_url", "md": "text"}
    for ending, kind in parts.items():
        (tmp_path / f"file.{ending}").write_bytes(b"text")
        assert file_part(tmp_path / f"file.{ending}")["type"] == kind


def test_help_says_all_commands() -> None:
    from omni_cluster.terminal.chat import HELP

    page = (ROOT / "docs" / "use" / "terminal.md").read_text()
    for name in ("/file", "/mic", "/voice", "/quit"):
        assert name in HELP and f"`{name}" in page
