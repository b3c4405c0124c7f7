"""`omni-cluster chat`: a conversation with a server, by text, files and sound."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from omni_cluster.api_client import ServedModel, printable
from omni_cluster.terminal.attachments import file_part, media_part
from omni_cluster.terminal.server import Server, TerminalError
from omni_cluster.terminal.sound import BYTES_A_SAMPLE, OpenDevice, Playing, found_player, recorded, saved

PROMPT: Final = "> "
HELP: Final = """/file PATH   attach a sound, a picture, a film or a text to the next message
/mic         say the next message; Enter ends it
/voice NAME  answer in that voice; without NAME the voices are listed
/quit        end; Ctrl-C stops an answer, and at the prompt it ends, too"""
NO_PLAYER: Final = (
    "Answers come without sound: there is no player here. Install the package sounddevice, aplay or ffplay, or name a "
    "folder by --save."
)


@dataclass(frozen=True)
class ChatOptions:
    """`save`: folder of the answers' sound; None: it is played."""

    url: str
    key_file: Path | None
    voice: str | None
    system: str | None
    wants_sound: bool
    save: Path | None


def run_chat(options: ChatOptions) -> None:
    """Talks until the input ends. Raises TerminalError; of a user at a terminal only for what is so at the start."""
    is_user = sys.stdin.isatty()
    with Server(options.url, options.key_file) as server:
        chat = Chat(server, options, server.model(), found_player())
        chat.greet(is_user)
        for line in _typed() if is_user else sys.stdin:
            try:
                if not chat.take(line.strip()):
                    return
            except TerminalError as error:
                if not is_user:
                    raise
                chat.note(str(error))
        chat.send()


def _typed() -> Iterator[str]:
    if importlib.util.find_spec("readline") is not None:
        import readline  # noqa: F401 - lines can be edited, and earlier ones are there
    with contextlib.suppress(EOFError):
        while True:
            yield input(PROMPT)
    print()


@dataclass
class _Came:
    """What came of an answer until now; `sound`: 16-bit mono."""

    text: str = ""
    sound: bytearray = field(default_factory=bytearray)


class Chat:
    """One conversation."""

    def __init__(self, server: Server, options: ChatOptions, model: ServedModel, player: OpenDevice | None) -> None:
        """Raises TerminalError for a folder that cannot be made."""
        self._server, self._options, self._model = server, options, model
        self._player = None if options.save is not None else player
        self._voice = options.voice
        self._console, self._notes = Console(highlight=False), Console(highlight=False, stderr=True)
        self._said: list[dict[str, Any]] = []
        if options.system:
            self._said.append({"role": "system", "content": options.system})
        self._parts: list[dict[str, Any]] = []
        self._wants_sound = bool(options.wants_sound and model.sample_rate_hz and (self._player or options.save))
        self._commands: dict[str, Callable[[str], bool]] = {
            "/file": self._attach,
            "/mic": self._record,
            "/voice": self._choose,
            "/help": self._help,
            "/quit": lambda _: False,
        }
        if options.save is not None:
            _make(options.save)

    def greet(self, is_user: bool) -> None:
        if is_user:
            self.note(f"{self._model.name} at {self._server.url}. /help says what can be typed.")
        if self._options.wants_sound and self._model.sample_rate_hz and not self._wants_sound:
            self.note(NO_PLAYER)

    def note(self, text: str) -> None:
        """Beside the conversation: on stderr."""
        self._notes.print(printable(text), markup=False, soft_wrap=True)

    def take(self, line: str) -> bool:
        """A line of the user. False: the conversation is over. Raises TerminalError."""
        name, _, rest = line.partition(" ")
        if name.startswith("/"):
            if name not in self._commands:
                raise TerminalError(f"{name} is no command; there are {', '.join(self._commands)}.")
            return self._commands[name](rest.strip())
        if line:
            self._parts.append({"type": "text", "text": line})
        self.send()
        return True

    def send(self) -> None:
        """Asks what is not asked yet. Raises TerminalError; what was asked is no part of the conversation then."""
        parts, self._parts = self._parts, []
        if not parts:
            return
        asked = {"role": "user", "content": parts}
        if text := self._answer(asked):
            self._said += [asked, {"role": "assistant", "content": text}]

    def _answer(self, asked: dict[str, Any]) -> str:
        """Shows and plays the answer as it comes. Returns its text; Ctrl-C makes that the end of it."""
        came = _Came()
        try:
            self._follow(asked, came)
        except KeyboardInterrupt:
            self._console.print()
            self.note("Stopped.")
        if came.sound and self._options.save is not None:
            path = saved(self._options.save, bytes(came.sound), self._model.sample_rate_hz)
            self.note(f"{path}: {len(came.sound) / BYTES_A_SAMPLE / self._model.sample_rate_hz:.2f} s")
        return came.text

    def _follow(self, asked: dict[str, Any], came: _Came) -> None:
        with Playing(self._player, self._model.sample_rate_hz) as playing:
            with contextlib.closing(self._server.answer(self._body(asked))) as parts:
                for part in parts:
                    came.text += part.text
                    came.sound += part.sound
                    self._console.print(printable(part.text), end="", markup=False, soft_wrap=True)
                    playing.add(part.sound)
            self._console.print()

    def _body(self, asked: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self._model.name, "messages": [*self._said, asked], "stream": True}
        if not self._wants_sound:
            return {**body, "modalities": ["text"]}
        audio = {"format": "pcm16"} | ({"voice": self._voice} if self._voice else {})
        return {**body, "modalities": ["text", "audio"], "audio": audio}

    # ---------------------------------------------------------- what is typed

    def _attach(self, path: str) -> bool:
        if not path:
            raise TerminalError("/file needs a path, for example /file question.wav.")
        part = file_part(Path(path).expanduser())
        self._parts.append(part)
        self.note(f"Attached {path}; it goes with the next message.")
        return True

    def _record(self, _: str) -> bool:
        self._parts.append(media_part(recorded(lambda: input("Speak; Enter ends it. ")), "audio/wav"))
        self.send()
        return True

    def _choose(self, name: str) -> bool:
        if name:
            self._voice = name
        else:
            self.note(", ".join(self._server.voices()))
        return True

    def _help(self, _: str) -> bool:
        self.note(HELP)
        return True


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TerminalError(f"the folder {folder} cannot be made ({error.strerror}); name another --save.") from None
